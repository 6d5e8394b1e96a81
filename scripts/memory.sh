#!/usr/bin/env bash
# Remakes the composition tables of results/README.md, "Memory": codes of K and V, eviction and EPS, alone and together,
# on the demo and the wide model at 4,096 and 8,192 tokens: KL on real text with 95 % intervals, 50 needles, bytes read
# and bytes kept; other formats by round trip, and states of fixed size. Then memory.md (who wins where), memory.svg (KL
# against both kinds of bytes) and memory.html, a page with every plot and table. Some three hours on 2 idle cores,
# half of them the wide model at 8,192.
# Usage: scripts/memory.sh [output directory]     (default: results)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,report)
export PATH="$venv/bin:$PATH"
experiments=scripts/experiments
arms=(--contexts 4096 8192 --needles 50 --texts 6 --text-steps 48)
python "$experiments/memory/run.py" "${arms[@]}" -o "$out/memory.jsonl" > /dev/null
took "the demo model"
python "$experiments/memory/run.py" "${arms[@]}" --model results/wide_model --shares 0.5 0.125 \
  -o "$out/memory-wide.jsonl" > /dev/null
took "the wide model"
some=(--contexts 4096 --needles 20 --texts 4)
python "$experiments/kv_formats/run.py" "${some[@]}" --text-steps 48 -o "$out/rewrites.jsonl" > /dev/null
python "$experiments/linear/run.py" "${some[@]}" --text-steps 128 -o "$out/linear.jsonl" > /dev/null
took "other formats, and what does not grow"
python "$experiments/kv_map/run.py" --backend cuda -o "$out/kv-map.jsonl" --plot "$out/kv-map.svg" > /dev/null
python "$experiments/memory/tables.py" "$out" > "$out/memory.md"
eps-proto report "$out/memory.jsonl" "$out/memory-wide.jsonl" -o "$out/memory.html"
