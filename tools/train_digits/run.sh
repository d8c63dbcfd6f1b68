#!/usr/bin/env bash
# The whole training and its evaluation, about 9 minutes on one H200: run.sh CLIPS.npz OUTPUT
#   OUTPUT/initial        synthetic voices alone: both of the next start from it
#   OUTPUT/main           all voices: the checkpoint
#   OUTPUT/left_out/NAME  five short trainings, each without one of FSDD's speakers, side by side
#   OUTPUT/results        word errors
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
clips=$1
out=$2
python=${PYTHON:-python3}
initial_minutes=${INITIAL_MINUTES:-1.6}
main_minutes=${MAIN_MINUTES:-3.7}
left_out_minutes=${LEFT_OUT_MINUTES:-2.2}
batch=${EVALUATION_BATCH:-40}
export PYTHONUNBUFFERED=1
train() { "$python" "$here/train.py" --clips "$clips" "$@"; }
evaluate() { "$python" "$here/evaluate.py" --clips "$clips" --batch "$batch" "$@"; }

train --output "$out/initial" --minutes "$initial_minutes" --human 0 --constant-rate
train --output "$out/main" --initial "$out/initial" --minutes "$main_minutes"
evaluate --checkpoint "$out/main/checkpoint" --results "$out/results/digits.json" &
jobs=($!)
for speaker in george jackson nicolas theo yweweler; do
  train --output "$out/left_out/$speaker" --initial "$out/initial" --leave-out "$speaker" --minutes "$left_out_minutes" >"$out/left_out_$speaker.log" 2>&1 &
  jobs+=($!)
done
wait "${jobs[@]}"
evaluate --leave-one-out "$out/left_out" --results "$out/results/leave_one_out.json"
