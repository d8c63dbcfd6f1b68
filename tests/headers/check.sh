#!/usr/bin/env bash
# check.sh COMPILER: compiles every public header and every tile header alone (-fsyntax-only), from the project's root.
set -euo pipefail

compiler=$1
if ! command -v "$compiler" >/dev/null; then
  echo "skipped: $compiler is not installed"
  exit 77
fi

check() {
  # Standard input, so that the header is not the main file (#pragma once).
  if ! echo "#include \"$2\"" | "$1" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -Iinclude -I. -x c++ -; then
    echo "$2 does not compile alone with $1"
    return 1
  fi
}
export -f check

mapfile -t headers < <(
  cd include && find tilewave -name '*.hpp' -o -name '*.h' | sort
  cd .. && find kernels -name '*.tile.hpp' | sort
)
printf '%s\0' "${headers[@]}" | xargs -0 -P "$(nproc)" -I {} bash -c 'check "$0" "$1"' "$compiler" {}
echo "$compiler: ${#headers[@]} headers"
