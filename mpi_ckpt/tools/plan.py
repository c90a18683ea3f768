"""`plan`: what each scheme of redundancy would cost, and which losses it would survive. Reads and writes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from mpi_ckpt.errors import UnusableOption
from mpi_ckpt.redundancy.groups import Unprotected, form_groups
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.tools import status, text

HELP = "what redundancy between nodes would cost, and what it survives"
DESCRIPTION = """Say what a save of --bytes, spread evenly over --ranks ranks on --nodes nodes, takes on node-local
disks with each scheme of redundancy, and how many nodes may be lost at once, whichever they are:

  single    no redundancy                                 B bytes a rank
  partner   a copy on another node                        2 B
  xor       a parity over a group of n ranks              B + B / (n - 1)
  rs:k+m    m parities over a group of n = k + m ranks    B + B m / k

No two ranks of a group run on one node where the numbers allow it; groups are larger where they do not divide, and
smaller, at a higher cost, where there are too few nodes. Where a scheme cannot protect the ranks from the loss of even
one node, a launch warns and goes on without: the line says what it costs then, a text below why, and the exit status is
1."""
EXAMPLE = "python -m mpi_ckpt plan --ranks 64 --nodes 16 --bytes 40GiB"

USUAL = ("single", "partner", "xor", "rs:4+2")


@dataclass(frozen=True)
class Line:
    """One scheme. Sizes in bytes; `bytes_a_rank` is of the rank that stores most.

    `error` says why the scheme cannot protect the ranks. The rest is what a launch does then: it saves unprotected.
    """

    scheme: str
    group_sizes: tuple[int, ...]
    bytes_a_rank: int
    bytes_in_total: int
    extra_bytes: int
    survives_nodes: int
    error: str | None = None


def plan(scheme: Scheme, domains: Sequence[str], nbytes: int) -> Line:
    """**Local.** What a save of `nbytes` costs, all ranks together, that run in `domains[rank]`."""
    try:
        grouping = form_groups(scheme, domains)
    except Unprotected as error:
        return replace(plan(Scheme.parse("single"), domains, nbytes), scheme=str(scheme), error=str(error))
    share = -(-nbytes // len(domains))
    stored = [(len(group), scheme.stored_bytes(share, len(group))) for group in grouping.groups]
    total = sum(members * each for members, each in stored)
    return Line(
        scheme=str(scheme),
        group_sizes=tuple(sorted({members for members, _ in stored})),
        bytes_a_rank=max(each for _, each in stored),
        bytes_in_total=total,
        extra_bytes=total - share * len(domains),
        survives_nodes=grouping.tolerance,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("--ranks", metavar="N", type=text.positive, required=True, help="ranks of the job")
    parser.add_argument("--nodes", metavar="N", type=text.positive, required=True, help="nodes (failure domains)")
    parser.add_argument("--bytes", metavar="SIZE", type=text.parse_size, required=True, help="of a save, all ranks")
    parser.add_argument(
        "--scheme",
        metavar="SCHEME",
        action="append",
        help=f"single, partner, xor or rs:k+m; several times for several (default: {', '.join(USUAL)})",
    )
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the table; the exit status."""
    ranks, nodes = arguments.ranks, arguments.nodes
    if nodes > ranks:
        raise UnusableOption(
            "there are more nodes than ranks",
            found=f"--ranks {ranks} --nodes {nodes}",
            expected="at least one rank on every node",
            action="Give the ranks of the whole job.",
        )
    domains = [f"node {rank * nodes // ranks}" for rank in range(ranks)]
    lines = [plan(Scheme.parse(name), domains, arguments.bytes) for name in arguments.scheme or USUAL]
    if arguments.json:
        text.print_json([asdict(line) for line in lines])
    else:
        print(text.table(_HEADER, [_row(line) for line in lines], left=("scheme", "survives")))
        for line in lines:
            if line.error:
                print(f"\n{line.error}")
        if any(line.error for line in lines):
            print(f"\n{_UNPROTECTED}")
    return status.NOT_WELL if any(line.error for line in lines) else status.WELL


_UNPROTECTED = """\
A launch goes on all the same, by `single`, with a warning and an event `unprotected`: a lost node takes along
what lies on the nodes alone, until a launch has enough of them again. --shared-every says how much that may be."""
_HEADER = ("scheme", "group", "a rank", "in total", "extra", "", "survives")


def _row(line: Line) -> tuple[str, ...]:
    sizes = "-".join(str(size) for size in line.group_sizes)
    share = 100 * line.extra_bytes / (line.bytes_in_total - line.extra_bytes)
    survived = f"the loss of any {line.survives_nodes} node{'s' * (line.survives_nodes != 1)}"
    return (
        line.scheme,
        sizes,
        text.size(line.bytes_a_rank),
        text.size(line.bytes_in_total),
        text.size(line.extra_bytes),
        f"{share:.1f}%",
        survived if line.survives_nodes else f"no loss of a node{': unprotected, see below' if line.error else ''}",
    )
