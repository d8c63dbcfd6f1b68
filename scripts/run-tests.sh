#!/usr/bin/env bash
# run-tests.sh PRESET [ctest options]: runs the tests of a preset's build and ends with one line that counts them.
set -uo pipefail

preset=$1
shift
report=$(mktemp)
trap 'rm -f "$report"' EXIT

# NVRTC where scripts/install-nvrtc.sh put it.
[[ -d build/nvrtc/lib ]] && export VIRTUAL_ENV=$PWD/build/nvrtc

ctest --preset "$preset" --no-label-summary --no-tests=error --output-junit "$report" --parallel "$(nproc)" "$@"
status=$?

count() {
  grep -o "^[[:space:]]*$1=\"[0-9]*\"" "$report" | grep -o '[0-9]\+' | head -n 1
}
total=$(count tests) failed=$(count failures) skipped=$(($(count skipped) + $(count disabled)))
echo "$((total - failed - skipped)) passed, $skipped skipped, $failed failed"
exit $status
