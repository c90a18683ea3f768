#!/bin/bash
# Train through a chain of jobs, for sites that do not let a job requeue itself:
#   jobs/chain.sh LINKS [options of sbatch] -- [flags of mpi_ckpt.train]
# The links share a name and Slurm runs one of a name at a time (singleton); each goes on where the one before stopped.
# A link that finds the run finished ends at once.
set -euo pipefail

# Knobs
NAME=${NAME:-minigpt} # of the jobs, and of the run: runs/$NAME

usage="usage: jobs/chain.sh LINKS [options of sbatch] -- [flags of mpi_ckpt.train]"
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2 && exit 2; }
links=$1 && shift
options=()
while (($# > 0)) && [[ $1 != -- ]]; do options+=("$1") && shift; done
(($# == 0)) || shift

cd "$(dirname "$0")/.."
for ((link = 1; link <= links; link++)); do
  REQUEUE=no sbatch --job-name="$NAME" --dependency=singleton --no-requeue "${options[@]}" jobs/train.sbatch "$@"
done
