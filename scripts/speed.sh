#!/usr/bin/env bash
# Measures speed on this machine and makes its raw files for results/speed.md: one layer at 32k against the fastest
# dense attention, how cost grows from 4k to 128k, a whole decode step of SmolLM2 at 8,000 tokens.
# About 10 minutes on 2 idle cores; times are of this machine alone.
# Usage: scripts/speed.sh [output folder, default results]
# With EPS_SPEED_LONG=1 also a whole step of Qwen2.5-Coder-0.5B at 32,000 tokens, whose prefill takes some minutes.
# (MLX takes no part in whole steps: its Linux build needs a quarter of an hour to prefill 32k tokens.)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,report,models)
python=$venv/bin/python
models=${EPS_MODEL_CACHE:-$HOME/.cache/eps/models}
mkdir -p "$models"
for model in smollm2 ${EPS_SPEED_LONG:+qwen-coder}; do
  $python scripts/get_model.py "$model" "$models/$model"
done
steps=$out/whole_step.new.jsonl  # rows are appended: it takes its place when all are there
rm -f "$steps"
for backend in cuda mlx; do
  shape=(--backend "$backend" --context 32768 --dtype bfloat16,float32)
  $python -m eps_core.cli bench "${shape[@]}" --method rq --bytes 0.1 -o "$out/speed-fine-$backend.jsonl"
done
$python -m eps_core.cli bench --backend cuda --scaling --dtype bfloat16 --method rq --bytes 0.1 \
  -o "$out/speed-scaling.jsonl"
step() { # MODEL CONTEXT
  $python scripts/experiments/whole_step/run.py --models "$models/$1" --context "$2" --backend cuda \
    --dtype bfloat16 -o "$steps"
}
step smollm2 8000
if [ -n "${EPS_SPEED_LONG:-}" ]; then step qwen-coder 32000; fi
mv "$steps" "$out/whole_step.jsonl"
$python scripts/speed_tables.py "$out"
