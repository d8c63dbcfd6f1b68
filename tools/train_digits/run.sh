#!/usr/bin/env bash
# The whole training and its evaluation, 8.4 minutes on one H200: run.sh CLIPS.npz OUTPUT. Started again, it goes on where it was stopped.
#   OUTPUT/initial        synthetic voices alone: both of the next start from it
#   OUTPUT/main           all voices: the checkpoint
#   OUTPUT/left_out/NAME  five short trainings, each without one of FSDD's speakers, side by side
#   OUTPUT/results        word errors
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
clips=$1
out=$2
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
train() { "$python" "$here/train.py" --clips "$clips" --resume "$@"; }
evaluate() { "$python" "$here/evaluate.py" --clips "$clips" --batch 40 "$@"; }

train --output "$out/initial" --minutes 1.5 --human 0 --constant-rate
train --output "$out/main" --initial "$out/initial" --minutes 3.3
evaluate --checkpoint "$out/main/checkpoint" --results "$out/results/digits.json" &
jobs=($!)
for speaker in george jackson nicolas theo yweweler; do
  train --output "$out/left_out/$speaker" --initial "$out/initial" --leave-out "$speaker" --minutes 2.0 &
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job"; done
evaluate --leave-one-out "$out/left_out" --results "$out/results/leave_one_out.json"
