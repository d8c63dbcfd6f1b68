#!/usr/bin/env bash
# install-nvrtc.sh DIR: makes NVIDIA's run-time compiler available where no CUDA toolkit is, so that kernels can be compiled (not run)
# without a GPU: a Python environment in DIR with the wheel nvidia-cuda-nvrtc. Does nothing where NVRTC is found otherwise. The runtime looks
# in $VIRTUAL_ENV: set it to DIR.
#
# Ends well when it cannot (no network): the tests that need NVRTC say so, and under CI=true fail.
set -euo pipefail

dir=${1:?usage: $0 DIR}
# The tests hold kernels against what the compiler reports (registers, spills): a newer one must not change that unasked.
wheel='nvidia-cuda-nvrtc==13.0.*'

found() {
  compgen -G "$1" >/dev/null
}
for root in "${CUDA_HOME:-/nonexistent}" /usr/local/cuda*; do
  found "$root/lib64/libnvrtc.so*" && exit 0
done
[[ $(/sbin/ldconfig -p 2>/dev/null) == *libnvrtc.so* ]] && exit 0
for root in "${VIRTUAL_ENV:-/nonexistent}" "$dir"; do
  found "$root/lib/python*/site-packages/nvidia/*/lib/libnvrtc.so*" && exit 0
done

echo "Installing $wheel into $dir"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { python3 -m venv "$dir" && "$dir/bin/pip" install --quiet --disable-pip-version-check "$wheel"; } >"$log" 2>&1; then
  tail -n 3 "$log" >&2
  rm -rf "$dir"
  echo "NVRTC is not there and could not be installed (see above): kernels will not be compiled for a GPU" >&2
fi
