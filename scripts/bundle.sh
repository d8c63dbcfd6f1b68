#!/usr/bin/env bash
# bundle.sh: packs what build/ holds into build/tilewave-<version>-linux-x86_64.tar.gz: command line, libraries, headers, and every registered kernel compiled for sm_90a, so
# that a GPU machine needs nothing but its driver; and the tests, each of which holds the library, into tilewave-<version>-tests-linux-x86_64.tar.xz, which is unpacked over
# the first. Then checks the result. Called by `make bundle`.
#
# The C++ runtime is not packed: a system of glibc 2.36 or newer has that of g++ 12, and a program may load libtilewave.so beside other C++ libraries.
set -euo pipefail

largest_bytes=$((64 << 20))  # of each archive
newest_glibc=2.36
newest_glibcxx=3.4.30  # g++ 12's
# What a system has anyway.
known_libraries='^(libc|libm|libdl|libpthread|libstdc\+\+|libgcc_s|ld-linux-x86-64)\.so\.[0-9]+$'

fail() {
  echo "make bundle: $*" >&2
  exit 1
}

is_elf() {  # is_elf FILE
  [[ $(head -c 4 "$1" | od -An -tx1 | tr -d ' ') == 7f454c46 ]]
}

# copy_libraries FOLDER: copies what the programs and libraries in FOLDER need, and what that needs, to FOLDER/lib, unless it is there or a system has it anyway; and
# each one's licence, as its Debian package states it, to FOLDER/share/doc. Our own programs' and libraries' DT_RPATH (cmake/install.cmake) leads them there.
copy_libraries() {
  local file library path package
  while IFS= read -r -d '' file; do
    is_elf "$file" || continue
    while read -r library path; do
      [[ $library =~ $known_libraries || -e $1/lib/$library ]] && continue
      [[ -f $path ]] || fail "$file needs $library, which is not installed"
      path=$(realpath "$path")
      cp "$path" "$1/lib/$library"
      package=$(dpkg-query --search "$path" 2>/dev/null || dpkg-query --search "${path#/usr}" 2>/dev/null) || fail "$path is of no package, so its licence is not known"
      package=${package%%:*}
      mkdir -p "$1/share/doc/$package"
      cp "/usr/share/doc/$package/copyright" "$1/share/doc/$package/"
    done < <(ldd "$file" | sed -n 's/^\s*\(\S*\) => \(\S*\).*/\1 \2/p')
  done < <(find "$1/bin" "$1/lib" "$1/tests" -type f -print0)
}

[[ $(uname -m) == x86_64 ]] || fail "this machine is $(uname -m); bundles are for x86_64"
for tool in objdump readelf strip; do
  command -v "$tool" >/dev/null || fail "$tool is not installed (package binutils)"
done
command -v xz >/dev/null || fail "xz is not installed (package xz-utils)"
[[ -d build/nvrtc/lib ]] && export VIRTUAL_ENV=$PWD/build/nvrtc
if build/tilewave devices --json | grep -q '"nvrtc": null'; then
  build/tilewave devices >&2
  fail "the kernels are compiled ahead, which needs NVRTC: a CUDA toolkit, or the Python wheel nvidia-cuda-nvrtc"
fi

version=$(build/tilewave --version)
version=${version#tilewave }
name=tilewave-$version-linux-x86_64
stage=build/bundle/$name
archive=build/$name.tar.gz
tests_archive=build/tilewave-$version-tests-linux-x86_64.tar.xz
rm -rf build/bundle "$archive" "$tests_archive"
cmake --install build --prefix "$stage" --strip >/dev/null
rm -f "$stage/lib/libtilewave_av.so"  # FFmpeg's libraries, of 170 MB and under the GPL, would have to be packed with it

mkdir "$stage/tests"
for program in build/tests/*_tests; do
  [[ $program == */@(models|speech|speech_cli)_tests ]] && continue  # what they read lies in the source tree
  strip -o "$stage/tests/$(basename "$program")" "$program"
done
mkdir -p "$stage/share/tilewave/benchmarks" "$stage/share/tilewave/python"
cp benchmarks/{accuracy,attention_cpu_peer,attention_peer,attention_reference,attention_work,gemm_peer,gpu_timing,norms_peer,package,recurrence_peer,records,training_peer}.py \
  "$stage/share/tilewave/benchmarks/"
tar -C python --exclude=__pycache__ -cf - tilewave | tar -C "$stage/share/tilewave/python" -xf -
cp scripts/bundle/run-tests.sh "$stage/share/tilewave/"
cp scripts/bundle/README.md LICENSE "$stage/"
copy_libraries "$stage"

echo "Compiling the registered kernels"
build/tilewave kernels compile --arch sm_90a --output "$stage/share/tilewave/kernels" >/dev/null
# GLM-ASR-Nano-2512's are registered, the bundled checkpoint's are not.
build/tilewave kernels warm --arch sm_90a --model "$stage/share/tilewave/models/digits" --output "$stage/share/tilewave/kernels" >/dev/null
# And those that the tests of the language launch.
TILEWAVE_TEST_PACK=$stage/share/tilewave/kernels build/tests/core_tests --gtest_filter=LanguageKernels.CompileForTheGpu --gtest_brief=1 >/dev/null

pack() {  # pack TAR-ARGUMENT...: the archive, to standard output
  tar --owner=0 --group=0 --numeric-owner -C build/bundle -c "$@"
}
tests=("$name/tests" "$name/share/tilewave/run-tests.sh")
pack "${tests[@]/#/--exclude=}" "$name" | gzip >"$archive"
# Each holds the same library, which a window over several of them finds again: a third of what gzip leaves.
pack "${tests[@]}" | xz --threads=1 --lzma2=preset=1,dict=256MiB >"$tests_archive"

# The check, on what was packed.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for file in "$archive" "$tests_archive"; do
  bytes=$(stat -c %s "$file")
  ((bytes < largest_bytes)) || fail "$file is $bytes bytes; the limit is $largest_bytes"
  tar -xf "$file" -C "$scratch"
done
root=$scratch/$name

not_newer() {  # not_newer VERSION LIMIT
  [[ $(printf '%s\n' "$1" "$2" | sort -V | tail -n 1) == "$2" ]]
}
newest() {  # newest FILE PREFIX: the newest version PREFIX_x.y that FILE needs
  objdump -T "$1" | grep -o "$2_[0-9.]*[0-9]" | sed "s/^$2_//" | sort -Vu | tail -n 1
}
elves=0
while IFS= read -r -d '' file; do
  is_elf "$file" || continue
  elves=$((elves + 1))
  short=${file#"$root/"}
  for limit in GLIBC:$newest_glibc GLIBCXX:$newest_glibcxx; do
    found=$(newest "$file" "${limit%:*}" || true)
    [[ -z $found ]] || not_newer "$found" "${limit#*:}" || fail "$short needs ${limit%:*} $found; bundles are for ${limit#*:}. Build it on Debian 12"
  done
  while read -r library; do
    [[ $library =~ $known_libraries || -e $root/lib/$library ]] || fail "$short needs $library, which a system may not have"
  done < <(readelf -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
  while IFS= read -r path; do
    [[ $path == "\$ORIGIN"* ]] || fail "$short looks for libraries in $path"
  done < <(readelf -d "$file" | sed -n 's/.*(R\(UN\)\{0,1\}PATH).*\[\(.*\)\]/\2/p' | tr ':' '\n')
done < <(find "$root/bin" "$root/lib" "$root/tests" -type f -print0)
# What the loader takes. The copied libraries find each other by the DT_RPATH of the program or library of ours that needs them, not alone.
while IFS= read -r -d '' file; do
  is_elf "$file" || continue
  while read -r library path; do
    [[ $library =~ $known_libraries || $path == "$root/"* ]] || fail "${file#"$root/"} takes $library from $path, not from the bundle"
  done < <(ldd "$file" | sed -n 's/^\s*\(\S*\) => \(\S*\).*/\1 \2/p')
done < <(find "$root/bin" "$root/tests" "$root"/lib/libtilewave* -type f -print0)
((elves >= 4)) || fail "only $elves programs and libraries are in $archive"

# Nothing of this machine's settings; a cache that keeps nothing, so that kernels come from the bundle.
clean() {
  env -i HOME="$scratch/home" PATH=/usr/bin:/bin TILEWAVE_CACHE=/dev/null/cache "$@"
}
clean "$root/bin/tilewave" --version >/dev/null
clean "$root/bin/tilewave" devices >/dev/null
kernels=$(clean "$root/bin/tilewave" kernels list --json | grep -c '"name":')
packed=$(clean "$root/bin/tilewave" kernels compile --arch sm_90a --json | grep -c '"from_cache": true')
((packed == kernels)) || fail "of $kernels registered kernels the bundle's program finds $packed compiled"
clean "$root/bin/tilewave" kernels warm --arch sm_90a | grep -q ': 0 compiled' || fail "a kernel of the bundled checkpoint is not in the bundle"
clean "$root/tests/gemm_tests" --gtest_filter='*Gemm*/cpu_f32' --gtest_brief=1 >"$scratch/log" 2>&1 || { tail -n 20 "$scratch/log" >&2; fail "its tests fail"; }
grep -Eq '\[  PASSED  \] [1-9][0-9]* test' "$scratch/log" || fail "no test was run"

du -h "$archive" "$tests_archive"
echo "$kernels registered kernels, $elves programs and libraries"
