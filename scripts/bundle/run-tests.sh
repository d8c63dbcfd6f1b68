#!/usr/bin/env bash
# run-tests.sh [--cpu]: runs the tests of a bundle: those of the GPU where one is usable, else (or with --cpu) those of the CPU.
#
# Where NVRTC is missing, a test is left out, in whole or in part, if it is about compiling, or if a kernel that it launches is not in the bundle. These are
# named. Exit codes: 0 nothing failed, 1 a test did, 2 wrong usage.
set -euo pipefail
cd "$(dirname "$0")/../.."

on_gpu=1
case "${1:-}" in
  "") ;;
  --cpu) on_gpu=0 ;;
  *) echo "usage: $0 [--cpu]" >&2; exit 2 ;;
esac

bin/tilewave devices
if ((on_gpu)) && ! bin/tilewave devices --json | tr -d '\n' | grep -q '"device": "cuda:[0-9]*"[^}]*"usable": true'; then
  echo "No usable GPU (see above): the CPU's tests are run."
  on_gpu=0
fi
filter='*cuda*'
((on_gpu)) || filter='-*cuda*'

log=$(mktemp)
names=$(mktemp)
trap 'rm -f "$log" "$names"' EXIT
failed_programs=0
passed=0 left_out=0 skipped=0 failed=0
for program in tests/*_tests; do
  status=0
  : >"$names"
  timeout 1800 "$program" --gtest_filter="$filter" --gtest_color=no >"$log" 2>&1 || status=$?
  # A test ends with its verdict. Left out is one in which want of the compiler is all that was wrong.
  counts=$(awk -v left_out_names="$names" '
    function leave_out(name) { ++left_out; sub(/,$/, "", name); print "  left out: " name > left_out_names }
    /^\[ RUN      \]/ { wrong = 0; thrown = 0; missing = 0; text = "" }
    { text = text $0 "\n" }
    /: Failure$/ { ++wrong }
    /cannot be compiled: NVRTC .* was not found/ { ++missing }
    /^C\+\+ exception with description "kernel .* cannot be compiled: NVRTC .* was not found/ { ++thrown }
    /^\[       OK \]/ { ++passed }
    /^\[  SKIPPED \] .* \([0-9]+ ms\)$/ { if (missing) leave_out($4); else ++skipped }
    /^\[  FAILED  \] .* \([0-9]+ ms\)$/ { if (thrown && wrong == thrown) leave_out($4); else { ++failed; printf "%s", text > "/dev/stderr" } }
    END { print passed + 0, left_out + 0, skipped + 0, failed + 0 }' "$log")
  read -r p l s f <<<"$counts"
  echo "$program: $p passed, $l left out for want of NVRTC, $s skipped, $f failed"
  cat "$names"
  passed=$((passed + p)) left_out=$((left_out + l)) skipped=$((skipped + s)) failed=$((failed + f))
  # 0 and 1 are GoogleTest's; with any other the program died.
  if ((status > 1)); then
    tail -n 20 "$log" >&2
    echo "$program: ended with status $status" >&2
    failed_programs=$((failed_programs + 1))
  fi
done
echo "$passed passed, $left_out left out for want of NVRTC, $skipped skipped, $failed failed"
((failed == 0 && failed_programs == 0 && passed > 0))
