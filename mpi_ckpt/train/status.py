"""Exit statuses of the training program: what a job script can act on.

All ranks leave with the same one. A launcher that combines the statuses of its ranks bit by bit (hydra does), among
them the 9 of ranks that an abort has killed, still reports it: every one above 2 contains the bits of 9.
"""

from __future__ import annotations

FINISHED = 0  # the run is complete, or --stop-at was reached
FAILED = 1  # anything without a status of its own: a full disk, a lost rank; the message says what
USAGE = 2  # the command line, or settings that contradict the stored run; the same line will fail again
DIVERGED = 73  # more rollbacks than --max-rollbacks allows, or --on-spike stop
PREEMPTED = 75  # asked to leave, checkpoint committed: launch the same line again
HUNG = 77  # no progress for --hang-timeout; launch the same line again
DAMAGED = 79  # a checkpoint is damaged or incomplete and may not be replaced by an older one
