#!/usr/bin/env bash
# Makes .venv beside this checkout, installs EPS into it with the pinned versions, and prints where it is.
# Usage: [EPS_VENV=folder] scripts/setup.sh [extras]   ("mlx,cuda,dev" for everything; default: this platform's backend,
# and outside of Macs what get_model.py needs where it does not reach the Hugging Face Hub)
# In a checkout that cannot be written, a folder of the user's under $TMPDIR takes a copy of it instead.
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 1 "$@"
cd "$(dirname "$0")/.."
if [ "$(uname)" = Darwin ]; then platform=mlx; else platform=cuda,models; fi
extras=${1:-$platform}
stamp=.installed-$(echo "$extras" | tr ',' '-')-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
source=.
if [ -n "${EPS_VENV:-}" ]; then
  venv=$EPS_VENV
elif [ -w . ] || [ -e ".venv/$stamp" ]; then
  venv=$PWD/.venv
else
  venv=${TMPDIR:-/tmp}/eps-venv-$(id -u)
  mkdir -p -m 700 "$venv"
  [ -O "$venv" ] || { echo "error: $venv is another user's: set EPS_VENV to a folder of yours" >&2; exit 2; }
fi
if [ ! -e "$venv/$stamp" ]; then
  python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old: EPS needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
    exit 2
  }
  "$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv"
  echo "installing eigenpage[$extras] into $venv ..." >&2
  if [ -w . ]; then
    edit=-e
  else  # an installation from here would write here
    edit= source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    cp -R pyproject.toml README.md LICENSE eps_core eps_mlx eps_cuda "$source"
    chmod -R u+w "$source"
  fi
  alone "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    $edit "$source[$extras]" >&2
  touch "$venv/$stamp"
fi
echo "$venv"
