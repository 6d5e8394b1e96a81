#!/usr/bin/env bash
# Measures speed on this machine and makes its raw files for results/README.md: one layer at 32k against the fastest
# dense attention, how cost grows from 4k to 128k, whole decode steps of the demo model and of SmolLM2 at 8,000 tokens.
# About 10 minutes on 2 idle cores; times are of this machine alone.
# Usage: scripts/speed.sh [output folder, default results]
# With EPS_SPEED_LONG=1 also whole steps at 32k of Qwen2.5-Coder-0.5B and of a random model of Llama 3.2 1B's shape,
# whose prefills take three quarters of an hour on 2 cores.
# (MLX takes no part in whole steps: its Linux build needs a quarter of an hour to prefill 32k tokens.)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,report)
python=$venv/bin/python
rm -f "$out"/speed-*.jsonl "$out/whole_step.jsonl"
for backend in cuda mlx; do
  shape=(--backend "$backend" --context 32768 --dtype bfloat16,float32)
  $python scripts/bench.py "${shape[@]}" --method box@128 --fraction 0.1,1 -o "$out/speed-coarse-$backend.jsonl"
  $python scripts/bench.py "${shape[@]}" --method rq --bytes 0.1 -o "$out/speed-fine-$backend.jsonl"
done
$python scripts/bench.py --backend cuda --scaling --dtype bfloat16 --method rq --bytes 0.1 \
  -o "$out/speed-scaling.jsonl"
models=${EPS_MODEL_CACHE:-$HOME/.cache/eps/models}
mkdir -p "$models"
step() { # MODEL CONTEXT DTYPE
  $python scripts/whole_step.py --models "$1" --context "$2" --backend cuda --dtype "$3" -o "$out/whole_step.jsonl"
}
step demo 32768 float32
$python scripts/get_model.py smollm2 "$models/smollm2"
step "$models/smollm2" 8000 float32
if [ -n "${EPS_SPEED_LONG:-}" ]; then
  $python scripts/get_model.py qwen-coder "$models/qwen-coder"
  step "$models/qwen-coder" 32000 float32
  step llama-1b 32768 bfloat16
fi
$python scripts/profile_step.py > "$out/profile-step.txt"
$python scripts/speed_tables.py "$out"
