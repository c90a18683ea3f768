"""Whether a person is watching: a rank's own stdout does not tell.

MPICH gives its ranks pipes although the user sits at a terminal, Open MPI gives them pseudo-terminals although the
output goes to a log. What counts is the stdout of the launcher.
"""

from __future__ import annotations

import os
import sys

_LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orterun", "orted")


def someone_watches() -> bool:
    """**Local.** True when what this process prints ends up on a terminal, as far as this host can tell."""
    launcher = None
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                name, _, rest = stat.read().partition("(")[2].rpartition(")")
        except OSError:
            break
        if name in _LAUNCHERS:
            launcher = pid
        pid = int(rest.split()[1])
    if launcher is None:
        return sys.stdout.isatty()
    try:
        target = os.readlink(f"/proc/{launcher}/fd/1")
    except OSError:  # the launcher is another user's, or on another host
        return False
    return target.startswith(("/dev/pts/", "/dev/tty"))
