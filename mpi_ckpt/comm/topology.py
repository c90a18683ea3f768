"""Where a rank runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

DOMAIN_VARIABLE = "MPI_CKPT_DOMAIN"


def failure_domain(name: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """**Local.** The name of what fails together with this rank: `name`, else $MPI_CKPT_DOMAIN, else the node's name.

    The variable makes several "nodes" of one machine, or one domain of the nodes that share a power supply. Under Slurm
    the node's name is $SLURMD_NODENAME, which differs even where several of its nodes run on one host.
    """
    return name or environment.get(DOMAIN_VARIABLE) or environment.get("SLURMD_NODENAME") or os.uname().nodename
