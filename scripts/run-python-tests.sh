#!/usr/bin/env bash
# run-python-tests.sh numpy | torch | ray: the Python package's tests, those that NumPy is enough for or those that need PyTorch or Ray, with the first Python that has what
# they need: $PYTHON, python3, the system's. Exits with 77 where none has, which ctest shows as skipped; without NumPy that is a failure in CI.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  numpy) modules=numpy,pytest tests=(python/tests --ignore=python/tests/with_torch --ignore=python/tests/with_ray) ;;
  torch) modules=numpy,pytest,torch tests=(python/tests/with_torch) ;;
  ray) modules=numpy,pytest,ray.data,pyarrow tests=(python/tests/with_ray) ;;
  *)
    echo "usage: $0 numpy|torch|ray" >&2
    exit 2
    ;;
esac

export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH}  # for what tests start, too
for python in "${PYTHON:-}" python3 /usr/bin/python3; do
  if [[ -n $python ]] && "$python" -c "import $modules" 2>/dev/null; then
    exec "$python" -m pytest -q -rs -p no:cacheprovider "${tests[@]}"
  fi
done
echo "skipped: no Python with $modules"
[[ -z ${CI:-} || $1 != numpy ]] || exit 1
exit 77
