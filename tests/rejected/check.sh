#!/usr/bin/env bash
# check.sh COMPILER: what a kernel's author gets wrong is an error of the host's compiler that says what it is, on the targets that it compiles.
set -euo pipefail

compiler=$1
compile() {
  "$compiler" -std=c++20 -fsyntax-only -Wall -Wextra -Werror -Iinclude -I. "$@" tests/rejected/product.cpp 2>&1
}

if ! output=$(compile); then
  echo "$output"
  echo "without a mistake it does not compile"
  exit 1
fi
failed=0
expect() {
  local message=$1
  shift
  if output=$(compile "$@"); then
    echo "compiles with $*"
    failed=1
  elif [[ $output != *"$message"* ]]; then
    echo "$output" | head -n 20
    echo "not said with $*: $message"
    failed=1
  fi
}
expect "a Fragment has as many rows as the kernel" -DROWS
expect "a Fragment has as many rows as the kernel" -DROWS -DANALYSE
expect "a Fragment holds accumulators: float, or i32" -DACCUMULATORS
expect "several warpgroups have a part each of this Fragment's rows" -DSPLIT_ROWS
expect "several warpgroups have a part each of this Fragment's rows" -DSPLIT_ROWS -DANALYSE
expect "needs steps(params, tile)" -DSTEPS
expect "a kernel with steps() has load(auto& producer" -DLOAD
expect "a kernel with steps() has load(auto& producer" -DLOAD -DANALYSE
expect "a kernel with steps() has finish(auto& block" -DFINISH
expect "a kernel without steps() has compute(auto& block" -DCOMPUTE
expect "Ring" -DTARGET
exit $failed
