# The usual tasks in one word each. The build itself is CMake's: see CMakePresets.json.
.DEFAULT_GOAL := build
.PHONY: build everything packages configure demo test kernels-test asan asan-host gpu-test gpu-bench bundle format install clean help

JOBS ?= $(shell nproc)
PREFIX ?= /usr/local

build: configure ## Build the program and the libraries in build/ (missing packages are installed first)
	@cmake --build --preset release --parallel $(JOBS) --target product

everything: configure
	@cmake --build --preset release --parallel $(JOBS)

packages: ## Install missing packages (Debian, Ubuntu)
	@scripts/install-packages.sh

configure: packages
	@cmake --preset release >/dev/null $(if $(CI),-DTILEWAVE_WERROR=ON) -DTILEWAVE_QUICK_BUILD=$(if $(CI),ON,OFF)

demo: configure ## Transcribe the recordings in assets/samples with the checkpoint in assets/digits
	@cmake --build --preset release --parallel $(JOBS) --target tilewave_cli
	build/tilewave transcribe assets/samples/*.wav

test: everything ## Build and run the tests that need no GPU (CI=true: warnings are errors, NVRTC is required)
	@scripts/install-nvrtc.sh build/nvrtc
	@scripts/run-tests.sh release

kernels-test: everything ## Compile for GPUs every kernel in the lists of tests, of which make test takes three each
	@scripts/install-nvrtc.sh build/nvrtc
	@TILEWAVE_EVERY_KERNEL=1 scripts/run-tests.sh release --label-regex '^kernels$$'

asan: packages ## Build and run the tests under the address and undefined-behaviour sanitizers
	@scripts/install-nvrtc.sh build/nvrtc
	@cmake --preset asan >/dev/null $(if $(CI),-DTILEWAVE_WERROR=ON)
	@cmake --build --preset asan --parallel $(JOBS)
	@scripts/run-tests.sh asan

asan-host: everything ## The same for all but the kernels and their tests: half an hour less
	@scripts/install-nvrtc.sh build/nvrtc
	@cmake --preset asan-host >/dev/null $(if $(CI),-DTILEWAVE_WERROR=ON)
	@cmake --build --preset asan-host --parallel $(JOBS)
	@scripts/run-tests.sh asan-host

gpu-test: everything ## Run the operations' tests on the GPU
	@scripts/gpu.sh test

gpu-bench: build ## Measure on the GPU, write benchmarks/results/
	@scripts/gpu.sh bench

bundle: everything ## Pack build/tilewave-<version>-linux-x86_64.tar.gz, which runs on a GPU machine with a driver only, and its tests beside it
	@scripts/install-nvrtc.sh build/nvrtc
	@scripts/bundle.sh

format: ## Format all C++ files
	@git ls-files --cached --others --exclude-standard '*.hpp' '*.cpp' '*.h' | xargs clang-format -i

install: build ## Install into PREFIX (default /usr/local)
	@cmake --install build --prefix $(PREFIX)

clean: ## Remove the build folders
	@rm -rf build build-debug build-asan build-asan-host

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
