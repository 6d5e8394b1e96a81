#!/usr/bin/env bash
# Remakes what results/README.md says of long contexts on results/long_model (32,768 tokens): KL and needles against
# bytes of every method at 8k, 16k and 32k, what the default may read less, RULER's look-ups with their real scores,
# recall and certified shares, the grid that the verdict is decided on, whole steps, dense, gated and verified.
# Four to six hours on 2 cores, by its steps, which were run one by one.
# Usage: scripts/long.sh [output directory]     (default: results)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,report)
export PATH="$venv/bin:$PATH"
model=results/long_model
captures=$(mktemp -d)
trap 'rm -rf "$captures"' EXIT

# 32,704: the tokens decoded after the prompt belong to the model's 32,768
plan=(--model "$model" --needles 40 --texts 8 --text-steps 48 --long 65536)
budgets=(--budgets 0.023 0.026 0.03 0.04 0.06 0.10 0.16 0.28)
python scripts/evaluate.py "${plan[@]}" --arms headline --contexts 32704 16384 8192 "${budgets[@]}" \
  -o "$out/long.jsonl" > "$captures/long.md"
took "the default, box, meanstd and oracles"
python scripts/evaluate.py "${plan[@]}" --arms floor --contexts 32704 \
  --budgets 0.016 0.018 0.021 0.024 0.028 0.035 0.05 -o "$out/long-floor.jsonl" > "$captures/long-floor.md"
took "what the default may read less"
python scripts/evaluate.py "${plan[@]}" --arms cuts --contexts 32704 16384 8192 --budgets 0.021 0.025 0.03 0.04 0.06 \
  -o "$out/long-cuts.jsonl" > "$captures/long-cuts.md"
took "what of that pays"
rm -f "$out/long-unit-scale.jsonl"  # of what was measured again here
python scripts/evaluate.py "${plan[@]}" --arms others --contexts 8192 16384 32704 --budgets 0.03 0.06 0.1 0.16 0.28 \
  -o "$out/long-others.jsonl" > "$captures/long-others.md"
took "the other methods"
OMP_NUM_THREADS=2 eps-proto evaluate --model "$model" --backend cuda --context 4096,8192,16384,32768 --samples 10 \
  --tasks niah_single,niah_multikey,niah_digits,niah_multivalue,niah_multiquery,associative_recall --text-steps 0 \
  --no-oracle --eps-budget 0.02 -o "$out/long-tasks.jsonl" > /dev/null
took "RULER's look-ups"
for context in 8192 16384 32704; do
  eps-proto capture --model "$model" --backend cuda --kv-dtype bfloat16 --context "$context" --steps 12 \
    -o "$captures/long-$context.safetensors" > /dev/null
  eps-proto replay "$captures/long-$context.safetensors" --backend cuda --budgets 0.01,0.05 \
    --method box@16,meanstd@16,ball@8,moments@8,rq@2,oracle@2,oracle@16 -o "$out/replay-long-$context.jsonl" > /dev/null
done
took "recall and certified shares"
eps-proto grid --model "$model" --backend cuda --preset long --needles 40 --texts 4 -o "$out/long-grid.jsonl"
took "the grid of the verdict"
rm -f "$out/long_speed.jsonl"
python scripts/verified_speed.py --models long,llama-1b --context 32768 -o "$out/long_speed.jsonl"
took "whole steps"
python scripts/evidence.py "$out" > /dev/null
eps-proto report "$out/long-grid.jsonl" "$out/long-tasks.jsonl" -o "$captures/long.html"
