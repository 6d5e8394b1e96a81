#!/usr/bin/env bash
# Where the time of `eps-proto run` goes. On a machine with an NVIDIA GPU: an Nsight Systems trace, and its NVTX ranges
# (scoring, attention, verify passes) summed up; needs nsys. Elsewhere: a py-spy profile, to be looked at with
# https://www.speedscope.app, and the functions that most of the time is spent in.
# Usage: [EPS_TRACE_FLAGS="--method rq .."] scripts/trace.sh [output directory]     (default: trace)
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 1 "$@"
cd "$(dirname "$0")/.."
out=${1:-trace}
mkdir -p "$out"
read -ra flags <<< "${EPS_TRACE_FLAGS:---method rq --max-new-tokens 64}"
if nvidia-smi -L > /dev/null 2>&1; then
  command -v nsys > /dev/null || { echo "error: nsys is not there: install NVIDIA Nsight Systems" >&2; exit 2; }
  venv=$(scripts/setup.sh)
  # replayed CUDA graphs show no ranges; every fourth step is timed layer by layer, without a graph
  nsys profile --trace=cuda,nvtx --force-overwrite=true --output "$out/decode" \
    "$venv/bin/eps-proto" run --device cuda "${flags[@]}" > "$out/run.txt"
  nsys stats --report nvtx_sum --force-export=true "$out/decode.nsys-rep" | tee "$out/nvtx.txt"
  echo "trace: $out/decode.nsys-rep, ranges: $out/nvtx.txt, the run's own output: $out/run.txt"
else
  venv=$(scripts/setup.sh)
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt py-spy >&2
  "$venv/bin/py-spy" record --format speedscope --rate 200 --output "$out/decode.speedscope.json" -- \
    "$venv/bin/eps-proto" run "${flags[@]}" > "$out/run.txt"
  "$venv/bin/python" scripts/top.py "$out/decode.speedscope.json" | tee "$out/top.txt"
  echo "profile: $out/decode.speedscope.json, functions: $out/top.txt, the run's own output: $out/run.txt"
fi
