#!/usr/bin/env bash
# Remakes everything in results/README.md but speed from nothing: raw measurements (JSONL), tables, figures.
# Under an hour on 2 cores. Usage: scripts/reproduce.sh [output directory]     (default: results)
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,report)
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
captures=$(mktemp -d)
trap 'rm -rf "$captures"' EXIT

# 1. quality against bytes: every method and the oracle, needles and KL along the decode, 2k to 16k
python scripts/experiments/methods/run.py --needles 40 --texts 6 --text-steps 48 -o "$out/methods.jsonl" > "$captures/methods.md"
took "methods on the demo model"
# 2. the same on a model of another shape: heads of 128, 8 layers, 4 kv heads
python scripts/experiments/methods/run.py --model results/wide_model --contexts 4096 --needles 16 --texts 4 --text-steps 32 \
  --budgets 0.04 0.07 0.10 0.14 0.20 0.28 -o "$out/wide.jsonl" > "$captures/wide.md"
took "methods on the wide model"
# the parts of the default's codes, on both
codes="--arms codes --budgets 0.025 0.03 0.035 0.04 0.05 0.07 --text-steps 48"
python scripts/experiments/methods/run.py $codes --needles 40 --texts 8 -o "$out/codes.jsonl" > "$captures/codes.md"
python scripts/experiments/methods/run.py $codes --model results/wide_model --contexts 4096 --needles 16 --texts 6 \
  -o "$out/codes-wide.jsonl" > "$captures/codes-wide.md"
took "codes on both"
# tails of 64 and 128, codes in two and in three parts
cuts="--arms cuts --text-steps 48"
python scripts/experiments/methods/run.py $cuts --budgets 0.025 0.03 0.035 0.04 0.05 0.06 0.08 --contexts 2048 4096 8192 16384 \
  --needles 40 --texts 8 -o "$out/cuts.jsonl" > "$captures/cuts.md"
python scripts/experiments/methods/run.py $cuts --budgets 0.025 0.03 0.035 0.04 0.05 0.07 --model results/wide_model --contexts 4096 \
  --needles 16 --texts 6 -o "$out/cuts-wide.jsonl" > "$captures/cuts-wide.md"
took "cuts on both"
rm -f "$out/unit-scale.jsonl" "$out/unit-scale-wide.jsonl"  # of the default that was measured again here
# 3. captures of both, replayed without a model: mass recall, certified skip
# the demo model ends at 16,384 tokens, the decoded ones included
for context in 2048 4096 8192 16000; do
  eps-proto capture --backend cuda --kv-dtype bfloat16 --context "$context" --steps 12 \
    -o "$captures/demo-$context.safetensors" > /dev/null
  eps-proto replay "$captures/demo-$context.safetensors" --backend cuda --budgets 0.1 \
    --method jl,1pc,fd,norm,random@2,box@16,meanstd@16,ball@8,moments@8,rq@2,oracle@2,oracle@16,oracle@128 \
    -o "$out/replay-$context.jsonl" > /dev/null
done
eps-proto capture --backend cuda --model results/wide_model --kv-dtype bfloat16 --context 4096 --steps 8 \
  -o "$captures/wide-4096.safetensors" > /dev/null
eps-proto replay "$captures/wide-4096.safetensors" --backend cuda --budgets 0.1 \
  --method jl,1pc,fd,norm,random@2,box@16,meanstd@16,ball@8,moments@8,rq@2,oracle@2,oracle@16,oracle@128 \
  -o "$out/replay-wide.jsonl" > /dev/null
took "replays"
# 4. what bounds certify, and what certainty costs
python scripts/experiments/methods/certificates.py "$captures/demo-4096.safetensors" -o "$out/certificates.jsonl" > /dev/null
took "certificates"
# 5. the parts of the default
python scripts/experiments/methods/ablate.py --texts 4 -o "$out/ablations.jsonl" > "$captures/ablations.md"
took "ablations"
# 6. ten million bounds
python scripts/experiments/bounds/run.py | tee "$captures/bounds.txt" | tail -n 1 > "$out/bounds.json"
took "bounds"
# 7. tables and figures
python scripts/experiments/methods/evidence.py "$out"
eps-proto report "$out/methods.jsonl" -o "$out/evidence.html" > /dev/null
took "done"
