"""Redundancy over MPI, directories for nodes: what is lost comes back bit for bit, or all ranks say that it cannot."""

from __future__ import annotations

import errno
import hashlib
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_ckpt.comm import exchange as exchange_module
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.combination import Combination, Part
from mpi_ckpt.errors import CheckpointError, CorruptShard, RankSilent, SaveFailed
from mpi_ckpt.redundancy.coder import combine
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.descriptor import read_descriptor
from mpi_ckpt.redundancy.protect import Protection, Source
from mpi_ckpt.redundancy.rebuild import rebuild
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import survey
from tests.ranks import contents, error_of, same_everywhere
from tests.redundancy_cases import record

SAVE = "0123456789abcdef"
MIB = 1 << 20


def bytes_of(rank: int, nbytes: int) -> bytes:
    """What a rank saves."""
    return np.random.default_rng(rank).bytes(nbytes)


class Bytes:
    """Of a file that is being written: from the first `lying` on they are not where a view could show them."""

    def __init__(self, data: bytes | np.ndarray, lying: int = 0) -> None:
        self.data, self.lying = np.frombuffer(data, np.uint8), lying

    def view(self, lo, n):
        return self.data[lo : lo + n] if lo < self.lying else None

    def read(self, lo, buffer, n):
        np.copyto(buffer[:n], self.data[lo : lo + n])


class Nodes:
    """The nodes of a launch, directories below `root`: `of[rank]` is the node that a rank runs on."""

    def __init__(self, comm, root: Path, of: str, timeout: float = 20.0, sizes: list[int] | None = None) -> None:
        self.comm, self.root, self.of = comm, root, of
        self.sizes = sizes or SIZES[: comm.size]
        self.council = Council(comm, timeout)
        self.domain = of[comm.rank]
        self.directory = root / self.domain

    def save(self, scheme: str, nbytes: list[int]) -> Path:
        """**Collective.** Every rank's file of nbytes[rank], protected."""
        self.directory.mkdir(exist_ok=True)
        file = self.directory / f"rank{self.comm.rank:05d}.h5"
        data = bytes_of(self.comm.rank, nbytes[self.comm.rank])
        file.write_bytes(data)
        found = self.protect(scheme, Source(file.name, len(data), Bytes(data)), hashlib.sha256(data).hexdigest)
        assert read_descriptor(self.directory / f"rank{self.comm.rank:05d}.redundancy.json") == found
        return file

    def protect(self, scheme: str, source: Source, sha256=lambda: "0" * 64):
        """**Collective.** The descriptor."""
        protection = Protection(self.council, Scheme.parse(scheme), self.domain, source, self.directory, save_id=SAVE)
        return protection.write(sha256)

    def lose(self, *nodes: str) -> None:
        """**Collective.** Nodes die, with all that is on their disks."""
        self.comm.barrier()
        for node in nodes if self.comm.rank == 0 else ():
            shutil.rmtree(self.root / node)
        self.comm.barrier()

    def contents(self) -> dict[str, str]:
        """**Collective.** Every file on every node, and its sha256."""
        self.comm.barrier()
        found = {name: hashlib.sha256(data).hexdigest() for name, data in contents(self.root).items()}
        self.comm.barrier()
        return found

    def rebuild(self, verify: bool = False):
        """**Collective.** The report, the same on all ranks."""
        records = [record(rank, bytes_of(rank, nbytes)) for rank, nbytes in enumerate(self.sizes)]

        def look(verify: bool):
            return survey(self.directory, SAVE, records, verify=range(len(records)) if verify else ())

        about = {"save_id": SAVE, "records": records, "verify": verify}
        report = rebuild(self.council, self.directory, look, self.domain, **about)
        return same_everywhere(self.comm, report)


SIZES = [3 * MIB + 5, 100, 2 * MIB, 3 * MIB + 4096, 0, MIB + 1, 7, 2 * MIB]


def lose_as_much_as_it_may_and_then_more(comm, root: Path, scheme: str, of: str, survived: str, fatal: str) -> None:
    """**Collective.** What the first loss took comes back bit for bit; the second is the same error on all ranks."""
    nodes = Nodes(comm, root, of)
    nodes.save(scheme, SIZES)
    before = nodes.contents()
    nodes.lose(*survived)
    report = nodes.rebuild()
    assert nodes.contents() == before
    gone = [f"rank{rank:05d}" for rank in range(comm.size) if of[rank] in survived]
    assert sorted(report.rebuilt) == [f"{name}.h5" for name in gone]
    assert (report.moved, report.weak) == ((), ())
    nodes.lose(*fatal)
    left = nodes.contents()
    error = error_of(comm, LostBeyondScheme, nodes.rebuild)
    assert of[error.rank] in fatal
    assert f"more is lost than {scheme} gives back" in str(error)
    assert nodes.contents() == left, "a rebuild that cannot be left something behind"


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("scheme", "of", "survived", "fatal"),
    [
        ("partner", "abcd", "a", "ac"),
        ("xor", "abcd", "d", "bd"),
        ("rs:2+2", "abcd", "ad", "abc"),
        ("xor", "aabc", "a", "ab"),
    ],
)
def test_four_ranks_lose_what_they_may_and_then_one_more(comm, shared_path, scheme, of, survived, fatal):
    lose_as_much_as_it_may_and_then_more(comm, shared_path, scheme, of, survived, fatal)


@pytest.mark.mpi(ranks=[8], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("scheme", "of", "survived", "fatal"),
    [
        ("partner", "aabcbcdd", "a", "ac"),
        ("xor", "aabcbbcc", "b", "ab"),
        ("rs:6+2", "abcdefgh", "bc", "abd"),
    ],
)
def test_eight_ranks_lose_what_they_may_and_then_one_more(comm, shared_path, scheme, of, survived, fatal):
    lose_as_much_as_it_may_and_then_more(comm, shared_path, scheme, of, survived, fatal)


@pytest.mark.mpi(ranks=[5], timeout=60, unit="s")
def test_two_neighbours_lost_and_uneven_ranks_per_node(comm, shared_path):
    nodes = Nodes(comm, shared_path, "aabbc")
    nodes.save("rs:1+1", SIZES)
    before, kept = nodes.contents(), contents(shared_path)
    for node in "abc":
        nodes.lose(node)
        nodes.rebuild()
        assert nodes.contents() == before
    for neighbours in ("ab", "bc"):
        nodes.lose(*neighbours)
        error_of(comm, LostBeyondScheme, nodes.rebuild)
        comm.barrier()
        if comm.rank == 0:
            for name, data in kept.items():
                (shared_path / name).parent.mkdir(exist_ok=True)
                (shared_path / name).write_bytes(data)
        comm.barrier()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_replacement_nodes_with_new_names_and_ranks_that_moved(comm, shared_path):
    Nodes(comm, shared_path, "abcd").save("xor", SIZES)
    before = Nodes(comm, shared_path, "abcd").contents()
    nodes = Nodes(comm, shared_path, "xacd")  # rank 0 on a new node, rank 1 where rank 0 was; b is gone
    nodes.lose("b")
    report = nodes.rebuild()
    assert report.moved == ("rank00000.h5", "rank00000.parity")
    assert report.rebuilt == ("rank00001.h5",)
    assert report.encoded == ("rank00001.parity",)
    after = nodes.contents()
    for rank, (old, new) in enumerate(zip("abcd", "xacd", strict=True)):
        for suffix in ("h5", "parity"):
            assert after[f"{new}/rank{rank:05d}.{suffix}"] == before[f"{old}/rank{rank:05d}.{suffix}"]
        descriptor = read_descriptor(shared_path / new / f"rank{rank:05d}.redundancy.json")
        assert [member.domain for member in descriptor.members] == [*"xacd"]
    if comm.rank == 1:  # a stale copy would do, too
        for stale in nodes.directory.glob("rank00000.*"):
            stale.unlink()
    nodes.lose("x")  # and protected again, as before
    assert nodes.rebuild().rebuilt == ("rank00000.h5",)
    assert nodes.contents()["x/rank00000.h5"] == before["a/rank00000.h5"]


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_two_members_of_a_group_on_one_node_are_reported_and_protected_anew(comm, shared_path):
    Nodes(comm, shared_path, "abcd").save("xor", SIZES)
    nodes = Nodes(comm, shared_path, "aacd")
    nodes.lose("b")
    assert nodes.rebuild().weak == ((0, 1, 2, 3),)
    nodes.save("xor", SIZES)
    nodes.lose("a")
    assert nodes.rebuild().rebuilt == ("rank00000.h5", "rank00001.h5")


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_fewer_ranks_look_after_the_files_of_more(comm, shared_path):
    whole = Nodes(comm, shared_path, "abc")
    whole.save("rs:1+2", SIZES)
    data = (shared_path / "c" / "rank00002.h5").read_bytes()
    few = comm.Split(comm.rank < 2, comm.rank)
    whole.lose("c")
    if comm.rank < 2:
        nodes = Nodes(few, shared_path, "ab", sizes=SIZES[:3])
        report = nodes.rebuild()
        assert report.rebuilt == ("rank00002.h5",)
        assert (shared_path / "a" / "rank00002.h5").read_bytes() == data
    comm.barrier()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_flipped_bit_is_never_built_upon(comm, shared_path):
    nodes = Nodes(comm, shared_path, "abcd")
    nodes.save("rs:2+2", SIZES)
    before = nodes.contents()
    if comm.rank == 1:
        (shared_path / "a" / "rank00000.h5").unlink()
        for name in ("rank00001.h5", "rank00001.parity"):
            file = shared_path / "b" / name
            data = bytearray(file.read_bytes())
            data[50] ^= 4
            file.write_bytes(data)
    left = nodes.contents()
    error = error_of(comm, CorruptShard, nodes.rebuild)
    assert error.path is not None
    assert error.path.endswith("a/rank00000.h5")
    assert {name: data for name, data in nodes.contents().items() if "rank" in name} == left
    report = nodes.rebuild(verify=True)
    assert report.rebuilt == ("rank00000.h5", "rank00001.h5")
    assert nodes.contents() == before


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_save_that_nothing_tells_of_is_an_error_and_so_is_one_of_another_save(comm, shared_path):
    nodes = Nodes(comm, shared_path, "abcd")
    nodes.directory.mkdir()
    assert "no node holds anything" in str(error_of(comm, LostBeyondScheme, nodes.rebuild))
    nodes.save("xor", SIZES)
    other = [record(rank, bytes(nbytes + 1)) for rank, nbytes in enumerate(nodes.sizes)]
    found = survey(nodes.directory, "f" * 16, other)
    error_of(
        comm,
        LostBeyondScheme,
        lambda: rebuild(nodes.council, nodes.directory, lambda _: found, "a", save_id="f" * 16, records=other),
    )


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_all_ranks_on_one_node_say_that_there_is_nothing_to_protect(comm, shared_path):
    nodes = Nodes(comm, shared_path, "aaaa")
    assert "one failure domain" in str(error_of(comm, CheckpointError, lambda: nodes.save("xor", SIZES)))
    nodes.save("single", SIZES)
    nodes.lose("a")
    error_of(comm, LostBeyondScheme, nodes.rebuild)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("what", ["no room", "unreadable"])
def test_a_failure_on_one_rank_fails_the_save_on_all_and_leaves_nothing(comm, shared_path, what):
    nodes = Nodes(comm, shared_path, "abcd")
    file = nodes.directory / f"rank{comm.rank:05d}.h5"
    nodes.directory.mkdir()
    file.write_bytes(bytes(3 * MIB))
    source = Bytes(bytes(3 * MIB))
    if comm.rank == 2 and what == "no room":
        (nodes.directory / "rank00002.parity.tmp").symlink_to("/dev/full")
    if comm.rank == 2 and what == "unreadable":
        source.data = source.data[:MIB]
    before = [name for name in nodes.contents() if not name.endswith(".tmp")]
    error = error_of(comm, SaveFailed, lambda: nodes.protect("xor", Source(file.name, 3 * MIB, source)))
    assert error.rank == 2
    assert list(nodes.contents()) == before


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_rank_that_falls_silent_is_named_within_the_timeout(comm, shared_path, monkeypatch):
    nodes = Nodes(comm, shared_path, "abc", timeout=1.0)
    real = exchange_module.exchange

    def slow(*arguments, **options):
        time.sleep(4.0)
        real(*arguments, **options)

    if comm.rank == 1:
        monkeypatch.setattr("mpi_ckpt.redundancy.protect.exchange", slow)
    began = time.monotonic()
    with pytest.raises((RankSilent, SaveFailed), match="rank 1"):
        nodes.save("xor", [MIB] * 3)
    if comm.rank != 1:
        assert time.monotonic() - began < 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_every_byte_is_read_once_in_bounded_memory(comm, shared_path, monkeypatch):
    nodes = Nodes(comm, shared_path, "abcd")
    reads, made = [], []
    real_port, real_mmap = exchange_module.Port, exchange_module.mmap.mmap

    def port(view, read, write, combine):
        def noting(part, lo, buffer, n):
            reads.append((part.file, part.offset + lo, n))
            return read(part, lo, buffer, n)

        return real_port(view, noting, write, combine)

    def mmap(fd, length):
        made.append(length)
        return real_mmap(fd, length)

    monkeypatch.setattr("mpi_ckpt.redundancy.files.Port", port)
    monkeypatch.setattr(exchange_module, "mmap", SimpleNamespace(mmap=mmap))
    nodes.save("rs:2+2", [40 * MIB + 17] * 4)
    assert sum(n for _, _, n in reads) == 40 * MIB + 17
    assert len({(file, lo) for file, lo, _ in reads}) == len(reads)
    assert sum(made) <= exchange_module.BUDGET
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpi_ckpt")]


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize(("sent", "written"), [(5, 5), (5, 9000), (13 * MIB + 7, 15 * MIB + 1), (2 * MIB, 7)])
def test_what_arrives_is_written_as_it_is_with_zeros_after_it(comm, sent, written):
    source = np.frombuffer(np.random.default_rng(1).bytes(sent), np.uint8)
    target = np.full(written, 255, np.uint8)

    def write(part, lo, buffer, n):
        target[lo : lo + n] = buffer[:n]
        buffer[n:] = 255  # as it may
        future = Future()
        future.set_result(None)
        return future

    port = exchange_module.Port(lambda part, lo, n: source[lo : lo + n], read=None, write=write, combine=combine)
    parts = [Part(0, "here", 0, sent)], [Part(1, "there", 0, written)]
    one = Combination(*map(tuple, parts), ((1,),))
    exchange_module.exchange(comm, [one], port, timeout=20)
    if comm.rank == 1:
        expected = np.zeros(max(sent, written), np.uint8)
        expected[:sent] = source
        assert target.tobytes() == expected[:written].tobytes()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_parity_can_be_made_from_memory_while_the_file_is_being_written(comm, shared_path):
    nodes = Nodes(comm, shared_path, "abc", sizes=[2 * MIB + rank for rank in range(3)])
    nodes.directory.mkdir()
    file = nodes.directory / f"rank{comm.rank:05d}.h5"
    data = np.frombuffer(bytes_of(comm.rank, nodes.sizes[comm.rank]), np.uint8)

    def written():
        assert (nodes.directory / f"rank{comm.rank:05d}.parity.tmp").exists(), "asked before the parity was made"
        file.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    nodes.protect("xor", Source(file.name, data.size, Bytes(data, lying=MIB)), written)
    before = nodes.contents()
    nodes.lose("b")
    assert nodes.rebuild().rebuilt == ("rank00001.h5",)
    assert nodes.contents() == before


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_shard_that_could_not_be_written_fails_the_save_on_all_and_leaves_no_parity(comm, shared_path):
    nodes = Nodes(comm, shared_path, "abc")
    nodes.directory.mkdir()

    def written():
        if comm.rank == 1:
            raise OSError(errno.EIO, "Input/output error", "the shard")
        return "0" * 64

    ones = SimpleNamespace(view=lambda lo, n: None, read=lambda lo, buffer, n: buffer[:n].fill(1))
    source = Source("rank.h5", MIB, ones)
    error = error_of(comm, SaveFailed, lambda: nodes.protect("xor", source, written))
    assert (error.rank, error.path) == (1, "the shard")
    assert nodes.contents() == {}
