#!/usr/bin/env bash
# What needs a Mac, in under 10 minutes, what matters most first: do kernels agree with array operations, a layer beside
# MLX's own attention, whether a step copies the pools, whole steps, mlx-lm, then tests.
# Usage: [PYTHON=python3] [OUT=results/mac] [MODEL=DIR] scripts/mac_check.sh [--dry-run]
#   MODEL: of whole steps and mlx-lm; without one the embedded model, which is too small to say much.
#   --dry-run: without a Mac, on MLX's CPU at tiny sizes; tests are found and not run, and no time means anything (a
#   minute).
# Needs: what `scripts/setup.sh mlx,cuda,mlx-lm,dev` installs. Nothing is installed.
# Every phase writes its files in OUT as it goes: layer.jsonl, pools.jsonl, step.jsonl and a log of each phase.
# Exit status: 0 if every phase passed, 1 if one failed or ran out of its time, 2 if it cannot start.
set -uo pipefail
. "$(dirname "$0")/help.sh"
python=$(command -v "${PYTHON:-python3}") || { echo "error: ${PYTHON:-python3} is not there: set PYTHON" >&2; exit 2; }
python=$(absolute "$python")
cd "$(dirname "$0")/.."
out=$(absolute "${OUT:-}") model=$(absolute "${MODEL:-}")
out=${out:-results/mac}
. scripts/phases.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" EPS_TEST_BACKENDS=mlx
"$python" -c 'import mlx.core, mlx_lm, torch, pytest, xdist, hypothesis, tokenizers, ml_dtypes, transformers' || {
  echo "error: $python lacks what this needs: run scripts/setup.sh mlx,cuda,mlx-lm,dev and set PYTHON" >&2
  exit 2
}
device=mps kernels=metal dtypes=bfloat16,float32
if [ $dry = 1 ]; then
  device=cpu kernels=numba dtypes=float32
elif ! "$python" -c 'import mlx.core as mx, sys; sys.exit(not mx.metal.is_available())'; then
  echo "error: $python sees no Metal: run on a Mac, or give --dry-run" >&2
  exit 2
fi

eps=("$python" -m eps_core.cli)
run=("${eps[@]}" run --device "$device" --method rq)
if [ -n "$model" ]; then run+=(--model "$model"); fi
phase check 120 "$python" -c '
import sys, time
import eps_mlx
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.kernel_check import disagreement

device, kernels, dtypes = sys.argv[1:]
print(eps_mlx.device_name(device), eps_mlx.versions())
for dtype in dtypes.split(","):
    for head_dim in (64, 128):
        start, spec = time.perf_counter(), CacheSpec(1, 2, head_dim, 8, dtype)
        found = disagreement(eps_mlx, device, kernels, spec, 8, EpsConfig.of(method="rq"), verified=True)
        if found is not None:
            sys.exit(f"kernels and array operations at {head_dim} x {dtype}: {found}")
        took = time.perf_counter() - start
        print(f"kernels agree with array operations: D {head_dim}, {dtype}, {took:.0f} s")
' "$device" "$kernels" "$dtypes"
suite=(tests/test_conformance.py tests/test_kernel_{attention,scores,select}.py tests/test_rows.py)
if [ $dry = 1 ]; then
  phase layer 60 "${eps[@]}" bench --backend mlx --device cpu --context 2048 --method rq --fraction 0.1 --repeats 2 \
    -o "$out/layer.jsonl"
  phase pools 60 "$python" scripts/experiments/pool_copies/run.py --device cpu --context 2048 --steps 4 \
    -o "$out/pools.jsonl"
  phase step 60 "${run[@]}" --backend mlx --prompt "$(head -c 400 README.md)" --eps-budget 32 --max-new-tokens 4 \
    --no-stop --metrics "$out/step.jsonl"
  phase mlx-lm 90 "${run[@]}" --engine mlx-lm --prompt "$(head -c 200 README.md)" --eps-budget 32 --max-new-tokens 2 \
    --no-stop
  # as on a Mac, which has no Triton
  phase tests 60 "$python" -c 'import sys
sys.modules["triton"] = None
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-k", "mlx-cpu-metal", *sys.argv[1:]]))' \
    "${suite[@]}"
else
  "$python" -c 'from eps_core.tasks.corpus import corpus; print(corpus().decode("ascii")[:24000])' >"$out/prompt.txt"
  long=(--prompt-file "$out/prompt.txt" --max-new-tokens 64 --no-stop)
  phase layer 90 "${eps[@]}" bench --backend mlx --device mps --context 8192,32768,65536 --method rq --fraction 0.1 \
    -o "$out/layer.jsonl"
  phase pools 60 "$python" scripts/experiments/pool_copies/run.py -o "$out/pools.jsonl"
  phase step 90 "${run[@]}" --backend mlx "${long[@]}" --metrics "$out/step.jsonl"
  phase mlx-lm 90 "${run[@]}" --engine mlx-lm "${long[@]}"
  phase tests 150 "$python" -m pytest -q --tb=short -p no:cacheprovider -n "$(sysctl -n hw.ncpu)" -k mlx-mps-metal \
    "${suite[@]}"
fi
finish
