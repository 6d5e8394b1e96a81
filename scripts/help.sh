# Sourced first by the other scripts, as `. "$(dirname "$0")/help.sh"`: --help prints the comment at the script's head
# and does nothing else.
for argument in "$@"; do
  case $argument in
    -h | --help)
      awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
      exit 0
      ;;
  esac
done

# absolute PATH: as the user wrote it, from where the user stands; nothing of nothing.
here=$PWD
absolute() { case $1 in /* | '') echo "$1" ;; *) echo "$here/$1" ;; esac; }
if [ -n "${EPS_VENV:-}" ]; then EPS_VENV=$(absolute "$EPS_VENV") && export EPS_VENV; fi

# at_most N ARGUMENT...: N operands and no flag, else exit status 2.
at_most() {
  local most=$1 argument
  shift
  for argument in "$@"; do
    case $argument in
      -*) echo "error: $argument is unknown: see $0 --help" >&2; exit 2 ;;
    esac
  done
  if [ $# -gt "$most" ]; then
    echo "error: $# arguments where at most $most is taken: see $0 --help" >&2
    exit 2
  fi
}

# begin [FOLDER]: to the checkout's root, with `out` the folder of results, made where it is not there.
begin() {
  at_most 1 "$@"
  cd "$(dirname "$0")/.."
  out=$(absolute "${1:-}") started=$(date +%s)
  out=${out:-results}
  mkdir -p "$out"
}

# took WHAT: says on stderr what is done, and the seconds since `begin`.
took() { echo "== $1: $(($(date +%s) - started)) s so far" >&2; }

# alone COMMAND...: runs it while no other script installs this checkout, as two would write over each other's metadata.
# Without flock, as on Macs, nothing keeps them apart.
alone() {
  if ! command -v flock > /dev/null; then "$@"; return; fi
  flock "${TMPDIR:-/tmp}/eps-install-$(id -u)-$(pwd -P | cksum | cut -d' ' -f1)" "$@"
}

# start_engines: begins to make the environments of kvpress, vLLM and SGLang beside what follows, each on one core; they
# end with the script, until await_engines has waited for them.
start_engines() {
  set -m  # a process group of its own
  (scripts/setup_kvpress.sh & failed=; scripts/test_sglang.sh --install || failed=yes; wait $! && [ -z "$failed" ]) >&2 &
  installing=$!
  set +m
  trap 'kill -- "-$installing" 2> /dev/null || true' EXIT
}
await_engines() {
  wait "$installing" || echo "an environment is missing: tried again later" >&2
  trap - EXIT
}
