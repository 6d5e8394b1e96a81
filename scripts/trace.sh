#!/usr/bin/env bash
# Where the time of `eps-proto run` goes. On a machine with an NVIDIA GPU: an Nsight Systems trace, and its NVTX ranges
# (scoring, attention, verify passes) summed up; needs nsys. Elsewhere: a py-spy profile, to be looked at with
# https://www.speedscope.app, and the functions that most of the time is spent in.
# Usage: [EPS_TRACE_FLAGS="--method rq .."] scripts/trace.sh [output directory]     (default: trace)
set -euo pipefail
. "$(dirname "$0")/help.sh"
at_most 1 "$@"
cd "$(dirname "$0")/.."
out=$(absolute "${1:-trace}")
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
  "$venv/bin/py-spy" record --format raw --rate 200 --output "$out/decode.stacks.txt" -- \
    "$venv/bin/eps-proto" run "${flags[@]}" > "$out/run.txt"
  # shares of the samples in which a function itself was at work, and in which it or what it called was
  awk '{ n = $NF; sub(/ [0-9]+$/, ""); gsub(/:[0-9]+\)/, ")"); d = split($0, frame, ";"); total += n
         own[frame[d]] += n; split("", seen)
         for (i = 1; i <= d; i++) if (!(frame[i] in seen)) { seen[frame[i]] = 1; all[frame[i]] += n } }
       END { for (one in all) printf "%6.1f%% %6.1f%%  %s\n", 100 * own[one] / total, 100 * all[one] / total, one }' \
    "$out/decode.stacks.txt" | LC_ALL=C sort -rn > "$out/top.txt"
  head -n 25 "$out/top.txt"
  echo "profile: $out/decode.stacks.txt, functions: $out/top.txt, the run's own output: $out/run.txt"
fi
