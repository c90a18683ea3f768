#!/bin/bash
# Train on this machine, unattended:   [RANKS=4 RUN_DIR=runs/local] jobs/local.sh [flags of mpi_ckpt.train]
# Launches the same line again after a crash, with a pause that doubles, until the run is finished or a number of
# launches in a row brought no newer step. Ctrl-C (or TERM, or USR1): one checkpoint, then the end; twice: the end.
set -euo pipefail

# Knobs
VENV=${VENV-}                   # an environment to activate; empty: PATH has it already
RANKS=${RANKS:-4}
RUN_DIR=${RUN_DIR:-runs/local}
CKPT_EVERY=${CKPT_EVERY:-10min}
MAX_LAUNCHES=${MAX_LAUNCHES:-5} # in a row without a newer step; then give up
PAUSE=${PAUSE:-1}               # seconds before the second of them; doubles
PAUSE_MAX=${PAUSE_MAX:-300}

# shellcheck source=jobs/_common.sh
. "$(dirname "$0")/_common.sh"
trap 'leave insist' INT TERM USR1
# shellcheck disable=SC1091  # the user's
[[ -z $VENV ]] || . "$VENV/bin/activate"

set -m # the launch gets its own process group: Ctrl-C reaches this script alone, which passes it on, once
attempt=first
while :; do
  count=$(count_launch "$RUN_DIR" "$attempt")
  before=$(newest_step "$RUN_DIR")
  status=0
  run_launch mpirun -n "$RANKS" python -m mpi_ckpt.train \
    --run-dir "$RUN_DIR" --ckpt-every "$CKPT_EVERY" --on-damage older "$@" || status=$?
  after=$(newest_step "$RUN_DIR")
  verdict=$(decide "$status" "$before" "$after" "$count" "$MAX_LAUNCHES")
  [[ $asked == no ]] || verdict="asked to leave"
  echo "[job] status $status at step $after: $verdict"
  [[ $verdict == again ]] || exit "$status"

  pause=0
  if ((after <= before)); then pause=$((PAUSE << (count < 20 ? count - 1 : 20))); fi
  sleep $((pause < PAUSE_MAX ? pause : PAUSE_MAX)) &
  wait $! || kill $! # in the background, so that a signal ends the pause
  [[ $asked == no ]] || exit "$status"
  attempt=next
done
