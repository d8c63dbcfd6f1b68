#!/usr/bin/env bash
# run-client-tests.sh: the tests of the server with OpenAI's package, curl and a WebSocket library, with the first Python that has them: $PYTHON, python3, the
# system's. Exits with 77 where none has, which ctest shows as skipped: pip install openai websockets numpy pytest
set -euo pipefail
cd "$(dirname "$0")/.."

for python in "${PYTHON:-}" python3 /usr/bin/python3; do
  if [[ -n $python ]] && "$python" -c "import numpy, openai, pytest, websockets" 2>/dev/null; then
    exec "$python" -m pytest -q -rs -p no:cacheprovider tests/clients "$@"
  fi
done
echo "skipped: no Python with numpy, openai, pytest, websockets"
exit 77
