"""What is planned from what the nodes hold, without MPI: old groups, new ones, and shards that none of them needs."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.descriptor import Descriptor, Member, ParityPiece, parity_name, write_descriptor
from mpi_ckpt.redundancy.planner import DATA
from mpi_ckpt.redundancy.recovery import Place, Vote, plan_recovery
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import Found, survey
from tests.redundancy_cases import record

SAVE = "0123456789abcdef"


def bytes_of(rank: int) -> bytes:
    return bytes([rank]) * 5000


def members(ranks) -> tuple[Member, ...]:
    records = [record(rank, bytes_of(rank)) for rank in ranks]
    return tuple(Member(r.rank, f"node{r.rank}", r.path, r.nbytes, r.sha256) for r in records)


def described(scheme: str, world: int, groups: list[tuple[int, ...]]) -> dict[int, Descriptor]:
    """Each rank's descriptor, with its parity."""
    found = {}
    for ranks in groups:
        group = Descriptor(SAVE, world, Scheme.parse(scheme), 0, members(ranks), ())
        for place, rank in enumerate(ranks):
            parts = planner.parity_parts(group.scheme, group.sizes, place)
            found[rank] = group.at(place, tuple(ParityPiece(p.offset, p.nbytes, "00000000") for p in parts))
    return found


def node(descriptor: Descriptor | None, rank: int, *, data: bool = True, parity: bool = True) -> Found:
    """What lies on the node of a rank of its own."""
    mine = record(rank, bytes_of(rank))
    files = {mine.path: mine.nbytes} if data else {}
    if descriptor and descriptor.parity and parity:
        files[parity_name(mine.path)] = descriptor.parity_nbytes
    return Found((descriptor,) if descriptor else (), files)


def plan(nodes: list[Found]):
    records = [record(rank, bytes_of(rank)) for rank in range(len(nodes))]
    return plan_recovery([Vote(Place(f"n{i}", f"/n{i}"), found) for i, found in enumerate(nodes)], SAVE, records)


OLD, NEW = [(0, 2), (1, 3)], [(0, 1), (2, 3)]


def test_old_and_new_groups_in_part_make_a_whole_cover():
    """0 and 1 are published anew: the two new descriptors are of one group, but only the old ones have 2 and 3."""
    old, new = described("partner", 4, OLD), described("partner", 4, NEW)
    found = plan([node(new[0], 0), node(new[1], 1), node(old[2], 2), node(old[3], 3)])
    assert sorted(group.ranks for group in found.groups) == OLD
    assert found.report.bare == ()
    assert sorted(found.report.encoded) == ["rank00000.parity", "rank00001.parity"]
    assert found.report.rebuilt == found.report.moved == ()


def test_a_rank_whose_data_are_lost_is_served_before_those_that_need_nothing():
    """Only its new group gives rank 3 back; rank 0, which needs none, has no other than the old one with rank 2."""
    old, new = described("partner", 4, OLD), described("partner", 4, NEW)
    found = plan([node(old[0], 0), node(old[1], 1, parity=False), node(new[2], 2), Found()])
    assert (2, 3) in [group.ranks for group in found.groups]
    assert found.report.rebuilt == ("rank00003.h5",)
    assert found.report.bare == (0, 1)


def test_a_parity_file_is_one_of_the_group_whose_descriptor_lies_beside_it():
    """Of rank 0 there is the new parity, and elsewhere the old descriptor: nothing gives rank 2 back."""
    old, new = described("partner", 4, OLD), described("partner", 4, NEW)
    elsewhere = node(new[3], 3, parity=False)
    nodes = [node(new[0], 0), node(new[1], 1), Found(), Found((*elsewhere.descriptors, old[0]), elsewhere.files)]
    with pytest.raises(LostBeyondScheme, match="the files of rank 2"):
        plan(nodes)
    nodes[3].files["rank00000.parity"] = old[0].parity_nbytes
    assert plan(nodes).report.rebuilt == ("rank00002.h5",)


def needed(nodes: list[Found]) -> tuple[int, ...]:
    with pytest.raises(LostBeyondScheme) as error:
        plan(nodes)
    return error.value.needed


def test_what_would_make_a_save_whole_is_all_that_no_group_gives_back():
    ring, stripes = (described(scheme, 5, [(0, 2), (1, 3, 4)]) for scheme in ("partner", "xor"))
    left = [node(ring[0], 0), Found(), node(ring[2], 2), Found(), node(ring[4], 4)]
    assert needed(left) == (1,), "the copy of 3 is with 4"
    left[4].files[parity_name("rank00004.h5")] -= 1
    assert needed(left) == (1, 3)
    assert needed([node(stripes[0], 0), Found(), node(stripes[2], 2), Found(), node(stripes[4], 4)]) == (1, 3)
    assert needed([Found(), node(ring[1], 1), Found(), node(ring[3], 3), node(ring[4], 4)]) == (0, 2)
    assert needed([node(None, 0), Found(), node(None, 2), Found(), node(None, 4)]) == (1, 3)


def test_what_lies_nowhere_and_is_in_no_group_is_named():
    old = described("xor", 4, OLD)
    with pytest.raises(LostBeyondScheme, match=r"more is lost than xor gives back: all members .* of ranks 1, 3") as e:
        plan([node(old[0], 0), Found(), node(old[2], 2), Found()])
    assert e.value.rank == 1
    with pytest.raises(LostBeyondScheme, match=r"parity group of ranks 0, 2 the files of rank 0 \(domain node0\)"):
        plan([Found(), node(old[1], 1), node(old[2], 2, parity=False), node(old[3], 3)])
    with pytest.raises(LostBeyondScheme, match="all that tells of redundancy, and the files of ranks 3"):
        plan([node(None, 0), node(None, 1), node(None, 2), Found()])
    with pytest.raises(LostBeyondScheme, match="no node holds anything"):
        plan([Found()] * 4)


def test_a_file_that_one_rank_of_a_node_found_damaged_is_read_by_none():
    nodes = [node(d, rank) for rank, d in described("partner", 4, OLD).items()]
    shared = Place("both", "/both")
    here = Found(nodes[0].descriptors + nodes[1].descriptors, nodes[0].files | nodes[1].files)
    votes = [Vote(shared, here), Vote(shared, Found(damaged=frozenset({"rank00000.h5"})))]
    votes += [Vote(Place(f"n{i}", f"/n{i}"), nodes[i]) for i in (2, 3)]
    found = plan_recovery(votes, SAVE, [record(rank, bytes_of(rank)) for rank in range(4)])
    assert found.report.rebuilt == ("rank00000.h5",)


def partitions(world: int):
    return st.permutations(range(world)).map(lambda p: [tuple(p[i : i + 2]) for i in range(0, world, 2)])


@given(st.sampled_from([2, 4, 6, 8]), st.sampled_from(["partner", "xor", "rs:1+1"]), st.data())
@settings(deadline=None, max_examples=200)
def test_while_every_shard_lies_somewhere_nothing_is_lost_whatever_is_left_of_redundancy(world, scheme, data):
    """Up to three protections, of which each rank has one or none, and every rank's data on any node."""
    protections = [described(scheme, world, data.draw(partitions(world))) for _ in range(3)]
    protections.append({})
    nodes = [node(data.draw(st.sampled_from(protections)).get(rank), rank, data=False) for rank in range(world)]
    for rank in range(world):
        mine = record(rank, bytes_of(rank))
        nodes[data.draw(st.integers(0, world - 1))].files[mine.path] = mine.nbytes
    found = plan(nodes)
    assert Counter(rank for group in found.groups for rank in group.ranks) == Counter(range(world))
    assert not found.report.rebuilt
    for key, host in found.targets.items():
        rank = found.groups[key.group].ranks[key.member]
        assert host == rank
    for rank in range(world):
        mine = record(rank, bytes_of(rank))
        targets = [host for key, host in found.targets.items() if key.kind == DATA and found.names[key] == mine.path]
        assert targets == ([] if mine.path in nodes[rank].files else [rank])


# -- what a look finds -------------------------------------------------------------------------------------------------


def test_data_are_compared_with_the_records_by_whom_it_is_asked_and_nobody_else(tmp_path, caplog):
    records = [record(rank, bytes_of(rank)) for rank in range(3)]
    for mine in records[:2]:
        (tmp_path / mine.path).write_bytes(bytes(mine.nbytes))
    (tmp_path / records[0].path).write_bytes(bytes_of(0))
    with caplog.at_level(logging.WARNING):
        assert survey(tmp_path, SAVE, records).damaged == frozenset()
        assert survey(tmp_path, SAVE, records, verify=[0, 2]).damaged == frozenset()
        assert caplog.text == ""
        assert survey(tmp_path, SAVE, records, verify=range(3)).damaged == {"rank00001.h5"}
    assert f"not what save {SAVE} wrote, which counts it as lost: {tmp_path / 'rank00001.h5'}" in caplog.text


def test_parity_is_compared_with_the_descriptor_of_this_save_alone(tmp_path):
    mine = described("partner", 4, OLD)[2]
    write_descriptor(tmp_path, mine)
    (tmp_path / "rank00002.parity").write_bytes(b"x" * mine.parity_nbytes)
    assert survey(tmp_path, SAVE, verify=range(4)).damaged == {"rank00002.parity"}
    assert survey(tmp_path, "f" * 16, verify=range(4)) == Found((), survey(tmp_path, SAVE).files)
