# Sourced by gpu_check.sh and mac_check.sh, which set `out`, the folder of results: sets `dry`, 1 where --dry-run is
# given; `phase` runs one, `finish` says which failed.
dry=0
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
fi
at_most 0 "$@"
mkdir -p "$out" || exit 2
failed=()

# limited SECONDS COMMAND...: a Mac has no timeout
limited() {
  if command -v timeout >/dev/null; then
    timeout --kill-after=10 "$@"
  else
    perl -e '
      my $seconds = shift; my $child = fork // exit 126;
      if (!$child) { setpgrp; exec @ARGV or exit 127 }
      $SIG{ALRM} = sub { kill "TERM", -$child; sleep 10; kill "KILL", -$child; exit 124 };
      alarm $seconds; waitpid $child, 0; exit($? & 127 ? 1 : $? >> 8)' "$@"
  fi
}

# phase NAME SECONDS COMMAND...: one phase, within its time; its output goes to the log, too
phase() {
  local name=$1 limit=$(($2 * (1 + 4 * dry))) start=$SECONDS status=0  # an interpreter on a busy machine is slow
  shift 2
  echo "=== $name (at most $limit s)"
  limited "$limit" "$@" 2>&1 | tee "$out/$name.log" | grep -v -i warn | tail -n 60
  status=${PIPESTATUS[0]}
  case $status in
    0) echo "=== $name: passed in $((SECONDS - start)) s" ;;
    124 | 137) echo "=== $name: FAILED, out of time after $limit s"; failed+=("$name (time)") ;;
    *) echo "=== $name: FAILED with status $status after $((SECONDS - start)) s"; failed+=("$name") ;;
  esac
}

# finish: the last line, and exit status 1 where a phase failed
finish() {
  if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED:'; printf ' %s;' "${failed[@]}"; echo
    exit 1
  fi
  echo "all phases passed"
}
