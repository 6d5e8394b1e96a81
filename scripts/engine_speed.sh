#!/usr/bin/env bash
# Measures decode inside each engine, its own attention against EPS in it, on real models: SmolLM2-135M at 4k and 8k
# tokens, Qwen2.5-Coder-0.5B at 4k to 32k: engine_speed.jsonl. About an hour on 2 idle cores, most of it prefills of
# vLLM.
# Usage: scripts/engine_speed.sh [output folder, default results]
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,dev)
scripts/test_vllm.sh --install
models=${EPS_MODEL_CACHE:-$HOME/.cache/eps/models}
mkdir -p "$models"
rows=$out/engine_speed.new.jsonl  # they are appended: it takes its place when all are there
rm -f "$rows"
export PYTHONPATH=$PWD
# Huge pages for weights of both sides: in small ones the first engine of a process, that with EPS, multiplied a
# fifth to two fifths slower than the second.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
for cell in smollm2:4096,8000 qwen-coder:4096,8192,16384,32000; do
  model=${cell%%:*}
  "$venv/bin/python" scripts/get_model.py "$model" "$models/$model"
  measure=(scripts/experiments/engine_speed/run.py --models "$models/$model" --context "${cell#*:}"
    -o "$rows" --engine)
  "$venv/bin/python" "${measure[@]}" transformers,mlx-lm
  "${EPS_VLLM_VENV:-.venv-vllm}/bin/python" "${measure[@]}" vllm
done
mv "$rows" "$out/engine_speed.jsonl"
