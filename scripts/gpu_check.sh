#!/usr/bin/env bash
# All checks that need a GPU, in under 10 minutes: kernels against the oracle, compute-sanitizer, times, targets.
# Usage: [PYTHON=python3] [OUT=results] scripts/gpu_check.sh [--dry-run]
#   --dry-run: the same phases without a GPU, in Triton's interpreter at tiny sizes; its times mean nothing (3 minutes).
# Needs: torch with CUDA, triton, numpy, click, pytest, hypothesis, tokenizers, safetensors, ml_dtypes; no installation.
# Exit status: 0 if every phase passed, 1 if one failed or ran out of its time, 2 if it cannot start.
set -uo pipefail
. "$(dirname "$0")/help.sh"
python=$(command -v "${PYTHON:-python3}") || { echo "error: ${PYTHON:-python3} is not there: set PYTHON" >&2; exit 2; }
python=$(realpath -s "$python")
cd "$(dirname "$0")/.."
out=${OUT:-results}
dry=0
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
at_most 0 "$@"
mkdir -p "$out" || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" EPS_TEST_BACKENDS=cuda
"$python" -c 'import torch, triton, numpy, click, pytest' || {
  echo "error: $python lacks torch, triton, numpy, click or pytest: set PYTHON to one that has them" >&2
  exit 2
}
if [ $dry = 1 ]; then
  export TRITON_INTERPRET=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  device=cpu
else
  device=cuda
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "error: $python sees no GPU: run on a machine with one, or give --dry-run" >&2
    exit 2
  }
  "$python" -c 'import torch, triton; p = torch.cuda.get_device_properties(0); print(p.name, f"{p.total_memory / 2**30:.0f} GiB, torch", torch.__version__, "triton", triton.__version__)'
fi

failed=()
# phase NAME SECONDS COMMAND...: one phase, within its time
phase() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  echo "=== $name (at most $limit s): $*"
  timeout --kill-after=10 "$limit" "$@" || status=$?
  case $status in
    0) echo "=== $name: passed in $((SECONDS - start)) s" ;;
    124 | 137) echo "=== $name: FAILED, out of time after $limit s"; failed+=("$name (time)") ;;
    *) echo "=== $name: FAILED with status $status after $((SECONDS - start)) s"; failed+=("$name") ;;
  esac
}

# one case each of N test functions of every file, whose id holds a word: the interpreter is slow, and the suite runs
# all of them
some_of_them='
import sys
import pytest
number, word, *files = sys.argv[1:]
class Some:
    def pytest_collection_modifyitems(self, items):
        first = {(item.module.__name__, item.originalname): item for item in reversed(items)
                 if word in item.name and "compile" not in item.name}
        kept = list(first.values())[::-1]
        items[:] = [item for i, item in enumerate(kept)
                    if sum(other.module is item.module for other in kept[:i]) < int(number)]
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *files], plugins=[Some()]))
'

layer=(--backend cuda --device "$device" --kernels triton)
tiny=(--context 512 --q-heads 4 --kv-heads 2 --head-dim 32 --method rq@2,box@16 --fraction 0.2 --repeats 1
  --warm-seconds 0)
shopt -s nullglob
kernel_tests=(tests/test_triton_*.py)
all_kernels=(tests/test_conformance.py tests/test_kernel_{attention,scores,select}.py tests/test_rows.py)
if [ ${#kernel_tests[@]} = 0 ]; then
  echo "=== kernels: FAILED, there are no tests/test_triton_*.py"
  failed+=("kernels")
elif [ $dry = 1 ]; then
  phase kernels 85 "$python" -c "$some_of_them" 4 "" "${kernel_tests[@]}"
  phase conformance 75 "$python" -c "$some_of_them" 6 cuda-cpu-triton "${all_kernels[@]}"
else
  # here they are compiled for this GPU, which says more than compiling them for others
  phase kernels 150 "$python" -m pytest -p no:cacheprovider -k "not compile" "${kernel_tests[@]}"
  phase conformance 150 "$python" -m pytest -p no:cacheprovider "${all_kernels[@]}" -k cuda-cuda
fi

if command -v compute-sanitizer >/dev/null && [ $dry = 0 ]; then
  # without Torch's pools every array is an allocation of its own, so that a read past its end shows
  phase sanitizer 60 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 7 \
    "$python" scripts/bench.py "${layer[@]}" "${tiny[@]}" --dtype bfloat16
else
  echo "=== sanitizer: compute-sanitizer is absent, or not used without a GPU: not run"
fi

if [ $dry = 1 ]; then
  echo "=== the times of the next phase are an interpreter's and mean nothing"
  phase bench 40 "$python" scripts/bench.py "${layer[@]}" "${tiny[@]}" --output "$out/gpu-dry-run.jsonl"
  records=("$out/gpu-dry-run.jsonl")
else
  rm -f "$out/gpu-bench.jsonl"  # else an old one would be judged
  phase bench 220 "$python" scripts/bench.py "${layer[@]}" --dtype bfloat16 --context 8192,65536,131072 \
    --batch 1,4,8 --method rq@2,rq@4,box@128 --bytes 0.1 --warm-seconds 0.3 --output "$out/gpu-bench.jsonl"
  records=("$out/gpu-bench.jsonl")
fi
# attention of a verify pass beside one row's: v(g)
rows=(scripts/experiments/rows_cost/run.py --backend cuda --device "$device" --kernels triton)
if [ $dry = 1 ]; then
  phase rows 40 "$python" "${rows[@]}" --context 300 --gamma 0,4 --q-heads 4 --kv-heads 2 --head-dim 32 --rounds 1 \
    --output "$out/gpu-rows-dry-run.jsonl"
else
  rm -f "$out/gpu-rows.jsonl"
  phase rows 60 "$python" "${rows[@]}" --context 8192,32768 --gamma 0,4,8,16 --output "$out/gpu-rows.jsonl"
fi
# the hooks on this device, gated beside dense: the same text, and bytes counted
if [ $dry = 1 ]; then
  asked=(--prompt "$(head -c 500 README.md)" --eps-budget 0.2 --max-new-tokens 2 --no-stop)
else
  asked=(--max-new-tokens 32)
fi
engine=("$python" -m eps_core.cli run --device "$device" --kernels triton --method rq "${asked[@]}" --engine)
if "$python" -c 'import transformers' 2>/dev/null; then
  phase transformers 60 "${engine[@]}" transformers
else
  echo "=== transformers: it is absent: its hook was not run"
fi
if [ $dry = 0 ] && "$python" -c 'import vllm' 2>/dev/null; then
  phase vllm 240 "${engine[@]}" vllm
else
  echo "=== vllm: it is absent, or there is no GPU: its hook was not run"
fi
phase targets 10 "$python" scripts/bench.py targets "${records[@]}"

if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED:'; printf ' %s;' "${failed[@]}"; echo
  exit 1
fi
echo "all phases passed"
