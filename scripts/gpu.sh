#!/usr/bin/env bash
# gpu.sh test | bench: runs the tests, or the benchmarks, that need a GPU. Called by `make gpu-test` and `make gpu-bench`.
# bench reads TILEWAVE_COMMIT (the commit to record, where git cannot say), TILEWAVE_QUICK (not empty: fewer samples) and TILEWAVE_SPEECH_MODEL
# (a checkpoint whose stages are timed; without one they are not).
set -euo pipefail

if [[ ! -e /dev/nvidiactl && ! -e /dev/dxg ]]; then
  echo "skipped: no CUDA device. \`make gpu-$1\` needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200), its driver (R525 or"
  echo "newer for CUDA 12, R580 for CUDA 13) and NVRTC (a CUDA toolkit, or the wheel nvidia-cuda-nvrtc). What was found here:"
  build/tilewave devices
  exit 0
fi

scripts/install-nvrtc.sh build/nvrtc
[[ -d build/nvrtc/lib ]] && export VIRTUAL_ENV=$PWD/build/nvrtc

case $1 in
  test)
    # One at a time: they share the GPU and its memory. Without a usable GPU they fail here, rather than skip.
    export TILEWAVE_REQUIRE_CUDA=1
    ctest --test-dir build --output-on-failure --no-label-summary --no-tests=error --label-regex '^(gpu|python)$' --parallel 1
    ;;
  bench)
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader --id=0 | tr '[:upper:] ' '[:lower:]-')
    results=benchmarks/results/$device
    mkdir -p "$results"
    # Where the sources were copied to without their history, the caller names the commit.
    commit=()
    [[ -n ${TILEWAVE_COMMIT:-} ]] && commit=(--commit "$TILEWAVE_COMMIT")
    quick=()
    [[ -n ${TILEWAVE_QUICK:-} ]] && quick=(--quick)
    status=0  # what fails is reported, what was measured is shown
    for source in kernels/*/*_bench.cpp benchmarks/exercise_bench.cpp; do  # FAMILY_bench.cpp
      family=$(basename "$source" _bench.cpp)
      build/tilewave bench "$family" --device cuda --output "$results/$family.json" "${commit[@]}" "${quick[@]}" || status=1
    done
    build/tilewave bench attention --ladder --device cuda --output "$results/attention_ladder.json" "${commit[@]}" "${quick[@]}" || status=1
    if [[ -n ${TILEWAVE_SPEECH_MODEL:-} ]]; then
      build/tilewave bench transcribe --stages --model "$TILEWAVE_SPEECH_MODEL" --device cuda --output "$results/speech.json" "${commit[@]}" || status=1
      if python3 -c 'import transformers' 2>/dev/null; then
        python3 benchmarks/speech_peer.py "$TILEWAVE_SPEECH_MODEL" --json "$results/speech_peer.json" "${commit[@]}" || status=1
      fi
    fi
    if python3 -c 'import torch' 2>/dev/null; then
      for peer in attention_peer gemm_peer norms_peer training_peer recurrence_peer; do
        if [[ $peer == recurrence_peer ]] && ! python3 -c 'import fla' 2>/dev/null; then
          echo "Recurrences: not measured, their peer needs flash-linear-attention: python3 -m pip install flash-linear-attention"
          continue
        fi
        python3 "benchmarks/$peer.py" --library build/libtilewave.so --json "$results/$peer.json" "${commit[@]}" "${quick[@]}" || status=1
      done
      build/tilewave kernels compile --arch sm_90a --output build/pack > build/pack.log || status=1
      python3 benchmarks/first_call.py --library build/libtilewave.so --pack build/pack --json "$results/first_call.json" "${commit[@]}" || status=1
      PYTHONPATH=python TILEWAVE_LIBRARY=build python3 benchmarks/python_overhead.py || status=1
    else
      echo "Calls from Python: not measured, their peers need PyTorch: python3 -m pip install torch"
    fi
    if python3 -c 'import matplotlib' 2>/dev/null; then
      python3 benchmarks/plot_performance.py || status=1
    else
      echo "Plots: not drawn, which needs matplotlib: python3 -m pip install matplotlib, then python3 benchmarks/plot_performance.py"
    fi
    python3 benchmarks/render_performance.py || status=1
    exit $status
    ;;
  *)
    echo "usage: $0 test|bench" >&2
    exit 2
    ;;
esac
