#!/usr/bin/env bash
# run-tests.sh PRESET [ctest options]: runs the tests of a preset's build that need no GPU. Ends with what was skipped and one line that counts the tests.
set -uo pipefail

preset=$1
shift
build=build
[[ $preset == release ]] || build=build-$preset
report=$(mktemp)
trap 'rm -f "$report"' EXIT

# NVRTC where scripts/install-nvrtc.sh put it.
[[ -d build/nvrtc/lib ]] && export VIRTUAL_ENV=$PWD/build/nvrtc

# The report holds all that the tests print: a test program is one entry for each suite, and says itself which of its tests passed.
ctest --preset "$preset" --no-label-summary --no-tests=error --output-junit "$report" --test-output-size-passed 100000000 \
  --test-output-size-failed 100000000 --parallel "$(nproc)" "$@"
status=$?

gpu=0
for program in "$build"/tests/*_tests; do
  gpu=$((gpu + $("$program" --gtest_list_tests --gtest_filter='*cuda*' | grep -c '^  ')))
done
echo "Left out: $gpu tests that need a GPU (make gpu-test)"

awk '
  /<testcase / { name = $0; sub(/.*<testcase name="/, "", name); sub(/".*/, "", name)
                 state = $0; sub(/.* status="/, "", state); sub(/".*/, "", state)
                 inside = 0; failed_here = 0 }
  /^kernels left out: / { left += $4 }
  /^\[ RUN      \] / { inside = 1 }
  /^\[       OK \] / { ++passed }
  /^\[  SKIPPED \] .* ms\)$/ { ++skipped; print "skipped: " name ": " $4 }
  /^\[  FAILED  \] .* ms\)$/ { ++failed; failed_here = 1 }
  # What is not of GoogleTest counts as one; so does a program that died or took too long.
  /<\/testcase>/ {
    if (state == "fail") { if (!failed_here) ++failed }
    else if (!inside) { if (state == "run") ++passed; else { ++skipped; print "skipped: " name } }
  }
  END { if (left) print "Left out: " left " kernels that tests would compile (make kernels-test)"
        printf "%d passed, %d skipped, %d failed\n", passed, skipped, failed }' "$report"
exit $status
