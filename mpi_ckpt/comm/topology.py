"""Where a rank runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

DOMAIN_VARIABLE = "MPI_CKPT_DOMAIN"
RANK_PLACEHOLDER = "{rank}"


def failure_domain(rank: int, name: str | None = None, environment: Mapping[str, str] = os.environ) -> str:
    """**Local.** The name of what fails together with `rank`: `name`, else $MPI_CKPT_DOMAIN, else the node's name.

    The variable makes several "nodes" of one machine ('node{rank}': in both, "{rank}" stands for the rank), or one
    domain of the nodes that share a power supply. Under Slurm the node's name is $SLURMD_NODENAME, which differs even
    where several of its nodes run on one host.
    """
    given = name or environment.get(DOMAIN_VARIABLE)
    if given:
        return given.replace(RANK_PLACEHOLDER, str(rank))
    return environment.get("SLURMD_NODENAME") or os.uname().nodename
