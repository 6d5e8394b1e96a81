#!/usr/bin/env bash
# Measures EPS and its peers on real pretrained models: KL against bytes at five cells, 8 documents of 64 steps each,
# then look-ups and verified decoding.
# Some hours on 2 idle cores (the cell of 32,768 tokens alone prefills for some minutes a document). Documents that are
# in real.jsonl.gz are not measured again, so it goes on where it was stopped. Prints the tables at its end;
# scripts/tables.py writes them into the pages of results/.
# Usage: [EPS_REAL_QUICK=1] scripts/real.sh [output folder, default results]
# EPS_REAL_QUICK=1: SmolLM2 at 2,048 tokens, 2 documents of 16 steps, into real-quick.jsonl; a few minutes.
set -euo pipefail
. "$(dirname "$0")/help.sh"
begin "$@"
venv=$(scripts/setup.sh mlx,cuda,dev)
models=${EPS_MODEL_CACHE:-$HOME/.cache/eps/models}
mkdir -p "$models"
"$venv/bin/python" scripts/get_model.py smollm2 "$models/smollm2"
if [ -n "${EPS_REAL_QUICK:-}" ]; then
  "$venv/bin/python" scripts/experiments/real/run.py --model "$models/smollm2" --context 2048 --documents 2 --steps 16 \
    --budgets 0.05 0.1 0.2 -o "$out/real-quick.jsonl"
  exit
fi
"$venv/bin/python" scripts/get_model.py qwen-coder "$models/qwen-coder"
rows=$out/real.jsonl
[ -f "$rows" ] || [ ! -f "$rows.gz" ] || gunzip -k "$rows.gz"
cell() { # MODEL CONTEXT [OPTION..]
  "$venv/bin/python" scripts/experiments/real/run.py --model "$models/$1" --context "$2" --documents 8 --steps 64 \
    "${@:3}" -o "$rows"
  took "$1 at $2 tokens"
}
cell smollm2 4096
cell smollm2 8128  # and 64 decoded: the model's 8,192
cell qwen-coder 8192
cell qwen-coder 16384
cell qwen-coder 32704 --budgets 0.01 0.02 0.05 0.125 0.2
# the default is safe at every length
for context in 40 150 500 700 1024 1536 2048 3072 4096; do
  cell smollm2 "$context" --default-only
  cell qwen-coder "$context" --default-only
done
# look-ups, and verified decoding: bytes a token, accepted drafts, equal texts
for context in 4096 8192 16384; do
  for model in smollm2 qwen-coder; do
    if [ "$model $context" != "smollm2 16384" ]; then
      "$venv/bin/python" scripts/experiments/real/answers.py --model "$models/$model" --documents 4 --questions 10 \
        --context $((context == 8192 ? 8064 : context)) -o "$out/real-answers.jsonl"
      took "look-ups and verified texts of $model at $context tokens"
    fi
  done
done
"$venv/bin/python" scripts/experiments/real/run.py --tables -o "$rows"
"$venv/bin/python" scripts/experiments/real/answers.py --tables -o "$out/real-answers.jsonl"
gzip -9nf "$rows"  # as results/ keeps it
