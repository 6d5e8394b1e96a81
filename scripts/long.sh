#!/usr/bin/env bash
# Remakes what results/README.md says of long contexts on results/long_model (32,768 tokens): KL and needles against
# bytes of every method at 8k, 16k and 32k, what the default may read less, RULER's look-ups with their real scores,
# recall and certified shares, the grid that the verdict is decided on, whole steps, dense, gated and verified.
# Four to seven hours on 2 cores, by its steps, which were run one by one. Stopped and started again, it goes on with the
# step that was stopped, and does finished steps of scripts/experiments/methods/run.py anew.
# Usage: [EPS_LONG_QUICK=1] scripts/long.sh [output directory]     (default: results)
# EPS_LONG_QUICK=1: all steps at an eighth of the tokens, of next to no documents, into a folder of their own: that the
# script runs, no results.
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
if [ -n "${EPS_LONG_QUICK:-}" ]; then
  for file in "$out"/long*.jsonl "$out"/replay-long-*.jsonl; do
    if [ -e "$file" ]; then
      echo "error: EPS_LONG_QUICK measures next to nothing and $out holds ${file##*/}: name a new folder" >&2
      exit 2
    fi
  done
fi
venv=$(scripts/setup.sh mlx,cuda,report)
export PATH="$venv/bin:$PATH"
model=results/long_model
captures=$(mktemp -d)
trap 'rm -rf "$captures"' EXIT

full=32768 needles=40 texts=8 steps=48 samples=10 replayed=12 models=long,llama-1b
grid=(--preset long --needles 40 --texts 4)
if [ -n "${EPS_LONG_QUICK:-}" ]; then
  full=4096 needles=2 texts=2 steps=8 samples=1 replayed=4 models=long
  PYTHONPATH=scripts python -c "import json; from experiments.grid.grid_settings import PRESETS
for block in PRESETS['long']:
    contexts = block['context'] if isinstance(block['context'], list) else [block['context']]
    block['context'] = [context // 8 for context in contexts]
print(json.dumps(PRESETS['long']))" > "$captures/quick.json"
  grid=(--grid "$captures/quick.json" --needles 2 --texts 1 --text-steps 8)
fi
# the tokens decoded after the prompt belong to the model's 32,768
longest=$((full - 64)) middle=$((full / 2)) shortest=$((full / 4))
each=("$longest" "$middle" "$shortest")
plan=(--model "$model" --needles "$needles" --texts "$texts" --text-steps "$steps" --long 65536)
budgets=(--budgets 0.023 0.026 0.03 0.04 0.06 0.10 0.16 0.28)
python scripts/experiments/methods/run.py "${plan[@]}" --arms headline --contexts "${each[@]}" "${budgets[@]}" \
  -o "$out/long.jsonl" > "$captures/long.md"
took "the default, box, meanstd and oracles"
python scripts/experiments/methods/run.py "${plan[@]}" --arms floor --contexts "$longest" \
  --budgets 0.016 0.018 0.021 0.024 0.028 0.035 0.05 -o "$out/long-floor.jsonl" > "$captures/long-floor.md"
took "what the default may read less"
python scripts/experiments/methods/run.py "${plan[@]}" --arms cuts --contexts "${each[@]}" --budgets 0.021 0.025 0.03 0.04 0.06 \
  -o "$out/long-cuts.jsonl" > "$captures/long-cuts.md"
took "what of that pays"
rm -f "$out/long-unit-scale.jsonl"  # of what was measured again here
python scripts/experiments/methods/run.py "${plan[@]}" --arms others --contexts "$shortest" "$middle" "$longest" \
  --budgets 0.03 0.06 0.1 0.16 0.28 -o "$out/long-others.jsonl" > "$captures/long-others.md"
took "the other methods"
OMP_NUM_THREADS=2 eps-proto evaluate --model "$model" --backend cuda --samples "$samples" \
  --context "$((full / 8)),$shortest,$middle,$full" --text-steps 0 --no-oracle --eps-budget 0.02 \
  --tasks niah_single,niah_multikey,niah_digits,niah_multivalue,niah_multiquery,associative_recall \
  -o "$out/long-tasks.jsonl" > /dev/null
took "RULER's look-ups"
for context in "$shortest" "$middle" "$longest"; do
  eps-proto capture --model "$model" --backend cuda --kv-dtype bfloat16 --context "$context" --steps "$replayed" \
    -o "$captures/long-$context.safetensors" > /dev/null
  eps-proto replay "$captures/long-$context.safetensors" --backend cuda --budgets 0.01,0.05 \
    --method box@16,meanstd@16,ball@8,moments@8,rq@2,oracle@2,oracle@16 -o "$out/replay-long-$context.jsonl" > /dev/null
done
took "recall and certified shares"
python scripts/experiments/grid/run.py --model "$model" --backend cuda "${grid[@]}" -o "$out/long-grid.jsonl"
took "the grid of the verdict"
rm -f "$out/long_speed.jsonl"
python scripts/experiments/verified_speed/run.py --models "$models" --context "$full" -o "$out/long_speed.jsonl"
took "whole steps"
python scripts/experiments/methods/evidence.py "$out" > /dev/null
python scripts/experiments/verdict/run.py "$out/long-grid.jsonl" "$out/long-tasks.jsonl"
eps-proto report "$out/long-grid.jsonl" "$out/long-tasks.jsonl" -o "$captures/long.html"
