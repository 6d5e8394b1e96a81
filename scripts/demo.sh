#!/usr/bin/env bash
# Sets everything up and answers the built-in needle prompt with the demo model, dense and with EPS, in one run.
# Usage: scripts/demo.sh [flags of `eps-proto run`]
set -euo pipefail
. "$(dirname "$0")/help.sh"
cd "$(dirname "$0")/.."
venv=$(scripts/setup.sh)
exec "$venv/bin/eps-proto" run "$@"
