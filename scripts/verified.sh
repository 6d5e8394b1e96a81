#!/usr/bin/env bash
# Remakes results/verified*: what exact text costs in bytes (both models), then in time on this machine, and tables.
# About an hour on 2 idle cores. Usage: scripts/verified.sh [output directory]     (default: results)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda)
export PATH="$venv/bin:$PATH"
OMP_NUM_THREADS=1 python scripts/experiments/grid/run.py --preset verified --backend cuda --texts 6 --needles 0 -o "$out/verified.jsonl"
OMP_NUM_THREADS=1 python scripts/experiments/grid/run.py --preset verified --backend cuda --texts 4 --needles 0 --model results/wide_model \
  -o "$out/verified-wide.jsonl"
rm -f "$out/verified_speed.jsonl"
python scripts/experiments/verified_speed/run.py -o "$out/verified_speed.jsonl"
python scripts/experiments/verified_speed/tables.py "$out" > "$out/verified.md"
