#!/usr/bin/env bash
# Makes .venv beside this checkout and installs EPS into it with the pinned versions.
# Usage: scripts/setup.sh [extras]   (default: this platform's backend; "mlx,cuda,dev" for everything)
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 1 "$@"
cd "$(dirname "$0")/.."
if [ "$(uname)" = Darwin ]; then platform=mlx; else platform=cuda; fi
extras=${1:-$platform}
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version) is too old: EPS needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2
  exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
stamp=.venv/.installed-$(echo "$extras" | tr ',' '-')-$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
if [ ! -e "$stamp" ]; then
  echo "installing eigenpage[$extras] into .venv ..." >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
  touch "$stamp"
fi
