#!/usr/bin/env bash
# Sets everything up and answers the built-in needle prompt with the demo model, dense and with EPS, in one run.
# Further arguments go to `eps-proto run`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
exec .venv/bin/eps-proto run "$@"
