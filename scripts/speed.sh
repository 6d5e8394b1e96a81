#!/usr/bin/env bash
# Measures speed on this machine and makes its raw files and figures for results/README.md: one layer at 32k against
# the fastest dense arm, how cost grows from 4k to 128k, whole decode steps. About 5 minutes on 2 idle cores; times are
# of this machine alone. Usage: scripts/speed.sh [output folder, default results]
# With EPS_SPEED_1B=1 also a random model of Llama 3.2 1B's shape, whose two prefills of 32k take half an hour on 2 cores.
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
$python scripts/bench.py --backend cuda --scaling --dtype bfloat16 --method rq --bytes 0.1 --plot "$out" \
  -o "$out/speed-scaling.jsonl"
$python scripts/whole_step.py --context 32768 --models demo --backend cuda --dtype float32 -o "$out/whole_step.jsonl"
if [ -n "${EPS_SPEED_1B:-}" ]; then
  $python scripts/whole_step.py --context 32768 --models llama-1b --backend cuda --dtype bfloat16 \
    -o "$out/whole_step.jsonl"
fi
$python scripts/profile_step.py > "$out/profile-step.txt"
$python scripts/speed_tables.py "$out"
