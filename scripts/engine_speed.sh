#!/usr/bin/env bash
# Measures decode inside each engine, its own attention against EPS in it, on the demo model and a 1B shape at 4k, 8k and
# 32k tokens: engine_speed.jsonl. About 25 minutes on 2 idle cores.
# Usage: scripts/engine_speed.sh [output folder, default results]
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,dev)
scripts/test_vllm.sh --collect-only -q > /dev/null # sets up .venv-vllm
rm -f "$out/engine_speed.jsonl"
export PYTHONPATH=$PWD
for model in demo llama-1b; do
  measure=(scripts/experiments/engine_speed/run.py --models $model -o "$out/engine_speed.jsonl" --engine)
  "$venv/bin/python" "${measure[@]}" transformers,mlx-lm
  "${EPS_VLLM_VENV:-.venv-vllm}/bin/python" "${measure[@]}" vllm
done
