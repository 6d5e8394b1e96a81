#!/usr/bin/env bash
# What needs a GPU, in under 10 minutes, what matters most first: do kernels agree with array operations, microseconds
# of every kernel, whole steps, then tests, compute-sanitizer and the engines.
# Usage: [PYTHON=python3] [OUT=results/gpu] scripts/gpu_check.sh [--dry-run]
#   --dry-run: without a GPU, in Triton's interpreter at tiny sizes; no tests, and no time means anything (2 minutes).
# Needs: torch with CUDA, triton, numpy, click, pytest, hypothesis, tokenizers, safetensors, ml_dtypes and transformers,
# which tests import; with pytest-xdist tests run on all cores. Nothing is installed.
# Every phase writes its files in OUT as it goes: times.jsonl, step.jsonl and a log of each phase.
# Exit status: 0 if every phase passed, 1 if one failed or ran out of its time, 2 if it cannot start.
set -uo pipefail
. "$(dirname "$0")/help.sh"
python=$(command -v "${PYTHON:-python3}") || { echo "error: ${PYTHON:-python3} is not there: set PYTHON" >&2; exit 2; }
python=$(realpath -s "$python")
cd "$(dirname "$0")/.."
out=$(absolute "${OUT:-}")
out=${out:-results/gpu}
. scripts/phases.sh
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" EPS_TEST_BACKENDS=cuda
needed='torch, triton, numpy, click, pytest, hypothesis, tokenizers, safetensors, ml_dtypes, transformers'
"$python" -c "import $needed" || {
  echo "error: $python lacks one of $needed: set PYTHON to one that has them" >&2
  exit 2
}
if [ $dry = 1 ]; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD/tests/dry:$PYTHONPATH"
  device=cpu
else
  device=cuda
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: $python sees no GPU: run on a machine with one, or give --dry-run" >&2
    exit 2
  }
  "$python" -c 'import torch, triton
p = torch.cuda.get_device_properties(0)
print(p.name, f"{p.total_memory / 2**30:.0f} GiB, torch", torch.__version__, "triton", triton.__version__)'
fi

kernel_tests=(tests/test_triton_{attend,rows,select,step,units,write}.py)
all_kernels=(tests/test_conformance.py tests/test_kernel_{attention,scores,select}.py tests/test_rows.py)
at_once='{"cascade": [], "rescore": 1.0}'

if [ $dry = 1 ]; then
  tiny=(--device cpu --cells 200x2)
  small='"budget": 0.2, "budget_floor": 32'
  phase check 60 "$python" scripts/gpu_times.py --check --device cpu
  phase times 60 "$python" scripts/gpu_times.py "${tiny[@]}" --settings "{$small}" -o "$out/times.jsonl"
  phase times-at-once 60 "$python" scripts/gpu_times.py "${tiny[@]}" --settings "{$small, ${at_once:1}" \
    -o "$out/times-at-once.jsonl"
  phase step 60 "$python" scripts/gpu_step.py --device cpu --shape tiny --layers 1 --cells 600x1 -o "$out/step.jsonl"
else
  parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "$(nproc)")
  tests=("$python" -m pytest -q --tb=short -p no:cacheprovider "${parallel[@]}")
  phase check 90 "$python" scripts/gpu_times.py --check
  phase times 60 "$python" scripts/gpu_times.py -o "$out/times.jsonl"
  phase times-at-once 60 "$python" scripts/gpu_times.py --settings "$at_once" -o "$out/times-at-once.jsonl"
  phase step 180 "$python" scripts/gpu_step.py -o "$out/step.jsonl"
  # here they are compiled for this GPU, which says more than compiling them for others
  phase kernels 150 "${tests[@]}" -k "not compile" "${kernel_tests[@]}"
fi
# the hooks on this device, sparse beside dense: the same text, and bytes counted
if [ $dry = 1 ]; then
  asked=(--prompt "$(head -c 200 README.md)" --eps-budget 32 --max-new-tokens 2 --no-stop)
else
  asked=(--max-new-tokens 32)
fi
engine=("$python" -m eps_core.cli run --device "$device" --kernels triton --method rq "${asked[@]}" --engine)
phase transformers 120 "${engine[@]}" transformers
if command -v compute-sanitizer >/dev/null && [ $dry = 0 ]; then
  phase sanitizer 75 compute-sanitizer --tool memcheck --error-exitcode 7 "$python" scripts/gpu_times.py --check
else
  echo "=== sanitizer: compute-sanitizer is absent, or not used without a GPU: not run"
fi

[ $dry = 1 ] || phase conformance 150 "${tests[@]}" -k cuda-cuda-triton "${all_kernels[@]}"
if [ $dry = 0 ] && "$python" -c 'import vllm' 2>/dev/null; then
  phase vllm 240 "${engine[@]}" vllm
else
  echo "=== vllm: it is absent, or there is no GPU: its hook was not run"
fi

finish
