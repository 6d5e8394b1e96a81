#!/usr/bin/env bash
# Sets everything up, fetches a small chat model once (SmolLM2-135M, 270 MB, into ~/.cache/eps/models or the folder
# $EPS_MODEL_CACHE), and answers a question about a long document with it, dense and with EPS. Without a network the
# embedded model answers a question of its own.
# Usage: scripts/demo.sh [flags of `eps-proto run`]
set -euo pipefail
. "$(dirname "$0")/help.sh"
scripts=$(dirname "$0")
venv=$("$scripts/setup.sh")
exec "$venv/bin/python" "$scripts/demo.py" "$@"
