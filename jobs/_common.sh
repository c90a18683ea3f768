# shellcheck shell=bash
# What train.sbatch and local.sh share: run a launch, then decide whether the same line is worth launching again.
# Sourced, never run. The statuses are those of mpi_ckpt/train/status.py; the runbook is jobs/README.md.

# The newest committed step of run directory $1; 0 for none. A step is committed when its manifest exists, here or, with
# --local, on the nodes, of which only the log tells: by the last line that says which step was committed, or restored.
newest_step() {
  local newest=0 manifest step log="$1/metrics.jsonl"
  for manifest in "$1"/checkpoints/step_*/manifest.json; do
    [[ $manifest =~ /step_([0-9]+)/manifest\.json$ && -e $manifest ]] || continue
    step=$((10#${BASH_REMATCH[1]}))
    ((step > newest)) && newest=$step
  done
  if [[ -r $log ]]; then # a line that a crash cut short has no end and does not count
    step=$(sed -nE '/^\{"event": "(commit|restore)", .*\}$/ s/.*"step": ([0-9]+)[,}].*/\1/p' "$log" | tail -n 1)
    ((${step:-0} > newest)) && newest=$step
  fi
  echo "$newest"
}

# Count this launch of run directory $1: the number of launches in a row, this one among them, that began without a
# newer step than the one before. Kept in a file, because a lost node takes the script along: nothing after the launch
# can be relied on. $2 = first forgets what was counted: somebody has just submitted the job, and may have mended it.
count_launch() {
  local file="$1/launches-without-progress" step=-1 count=0 newest
  mkdir -p "$1"
  newest=$(newest_step "$1")
  if [[ $2 != first && -r $file ]]; then read -r step count <"$file" || true; fi
  if ((newest > step)); then count=1; else ((count += 1)); fi
  echo "$newest $count" >"$file.tmp"
  mv "$file.tmp" "$file"
  echo "$count"
}

# After a launch that ended with status $1, began at step $2 and left step $3, as the $4-th in a row without progress,
# of at most $5: finished | hopeless (the same line would fail again) | again | give-up.
decide() {
  case $1 in
    0) echo finished ;;
    2 | 73 | 79) echo hopeless ;;
    *) if (($3 > $2 || $4 < $5)); then echo again; else echo give-up; fi ;;
  esac
}

# The handler of the signals that ask a script to leave: `trap leave USR1`, before anything slow. A second signal would
# end the launch without a checkpoint, and Slurm may ask twice (no time left, preempted): only $1 = insist passes it on.
asked=no child='' interrupted=no
leave() {
  interrupted=yes
  if [[ -n $child && ($asked == no || ${1:-} == insist) ]]; then
    echo "[job] asked to leave: passing USR1 on"
    kill -USR1 "$child" 2>/dev/null || true
  fi
  asked=yes
}

# Run a command, and pass on to it, as USR1, that the script was asked to leave; its status, or 75 if it never began.
run_launch() {
  local status=0 again
  [[ $asked == no ]] || return 75
  "$@" </dev/null &
  child=$!
  while :; do # a signal ends `wait`, not the command
    interrupted=no again=0
    wait "$child" || again=$?
    ((again == 127)) || status=$again # 127: it was waited for already, just before the signal
    [[ $interrupted == yes ]] || break
  done
  child=''
  return "$status"
}
