#!/usr/bin/env bash
# Installs the distribution packages that building and testing Tilewave needs (Debian 12, Ubuntu 24.04 and newer), those only that are
# missing. Silent, and without network access, when none is.
#
#   scripts/install-packages.sh          to build, test and run
#   scripts/install-packages.sh bench    also OpenBLAS, which `tilewave bench` compares with on the CPU
set -euo pipefail

packages=(g++ make cmake ninja-build python3 python3-venv python3-numpy python3-pytest
  libfmt-dev nlohmann-json3-dev libcli11-dev libdlpack-dev libgtest-dev
  libsndfile1-dev libsoxr-dev libasound2-dev libavformat-dev libavcodec-dev libpcre2-dev libutf8proc-dev libboost-dev
  libspdlog-dev prometheus-cpp-dev zlib1g-dev xz-utils)
case "${1:-}" in
  "") ;;
  bench) packages+=(libopenblas0-pthread) ;;
  *) echo "usage: $0 [bench]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "This is no Debian or Ubuntu system. Please see to it that what these packages hold is installed: ${packages[*]}" >&2
  exit 0  # where it is, the build works; where not, CMake says what is missing
fi

missing=()
for package in "${packages[@]}"; do
  [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
((${#missing[@]})) || exit 0

as_root=()
if [[ $(id -u) != 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "Missing packages, and neither root nor sudo to install them. As root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "Installing ${missing[*]}"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >>"$log" 2>&1
}
# A source of the user's own that cannot be reached makes `update` fail, and need not matter.
"${as_root[@]}" apt-get update --quiet >>"$log" 2>&1 || true
if ! install; then
  tail -n 20 "$log" >&2
  echo "Could not install them (see above). By hand: apt-get update && apt-get install ${missing[*]}" >&2
  exit 1
fi
