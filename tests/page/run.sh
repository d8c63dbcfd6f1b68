#!/usr/bin/env bash
# run.sh: the tests of the page of `tilewave serve`, with the first Python that has pytest and playwright: $PYTHON, python3. Exits with 77 where none has, or
# where Chromium is missing, which ctest shows as skipped.
set -euo pipefail
cd "$(dirname "$0")/../.."

missing() {
  echo "skipped: $1. To run these tests: apt-get install chromium; pip install pytest playwright"
  exit 77
}

command -v chromium chromium-browser google-chrome >/dev/null || missing "Chromium was not found"
for python in "${PYTHON:-}" python3; do
  if [[ -n $python ]] && "$python" -c "import pytest, playwright" 2>/dev/null; then
    exec "$python" -m pytest -q -rs -p no:cacheprovider tests/page "$@"
  fi
done
missing "no Python with pytest and playwright"
