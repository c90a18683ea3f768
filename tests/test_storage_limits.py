"""Full disks, large files, small memory, odd file systems, failures in the middle: nothing is left behind."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.layout import Block
from mpi_ckpt.storage import direct, staging
from mpi_ckpt.storage.crc import crc32c
from mpi_ckpt.storage.hdf5_image import Dataset, lay_out
from mpi_ckpt.storage.records import BlockRecord
from mpi_ckpt.storage.shard_file import (
    StreamedArray,
    hash_file,
    read_block,
    read_shard,
    verify_file,
)
from tests.launch import HANG, ROOT
from tests.storage_cases import (
    MIB,
    bits,
    mounted,
    needs_strace,
    nothing_left_behind,
    operations,
    same_bits,
    save_shard,
    sha256,
    to_write,
    under_strace,
)

slow = pytest.mark.skipif("MPI_CKPT_SLOW_TESTS" not in os.environ, reason="set MPI_CKPT_SLOW_TESTS to run it")


@pytest.mark.parametrize(("kind", "options"), [("tmpfs", "size=4m"), ("tmpfs", "size=1m"), ("tmpfs", "nr_inodes=1")])
def test_a_full_file_system_is_an_oserror_and_leaves_no_file(tmp_path, kind, options):
    array = np.ones(3 * MIB)
    with mounted(tmp_path, kind, options):
        for _ in range(2):
            with nothing_left_behind(tmp_path), pytest.raises(OSError, match="No space left") as caught:
                save_shard(tmp_path, [to_write("a", array)])
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.filename == str(tmp_path / "rank00000.h5.tmp")
        if "size" in options:
            path, record = save_shard(tmp_path, [to_write("a", array[:1009])])  # there is room for less
            verify_file(path, record)


def test_a_limit_on_the_file_size_is_an_oserror_and_leaves_no_file(tmp_path):
    def child():
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 * MIB, 5 * MIB))
        with nothing_left_behind(tmp_path), pytest.raises(OSError, match="too large") as caught:
            save_shard(tmp_path, [to_write("a", np.ones(2 * MIB))])
        assert caught.value.errno == errno.EFBIG
        assert caught.value.filename == str(tmp_path / "rank00000.h5.tmp")

    in_a_child(child)


def in_a_child(work):
    """Run `work` in a forked process, which must end well."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@needs_strace
@pytest.mark.parametrize("fault", ["pwrite64:error=EIO:when=3", "fsync:error=EIO", "close:error=EIO"])
def test_an_error_of_the_disk_is_an_oserror_and_leaves_no_file(tmp_path, fault):
    code = """
import numpy as np, sys
from tests.storage_cases import save_shard, to_write
try:
    save_shard(here, [to_write("a", np.ones(2 << 20))])
except OSError as error:
    sys.exit(f"{error.errno} {error.filename}")
"""
    target = tmp_path / "rank00000.h5.tmp"
    said, _ = under_strace(tmp_path, code, "-P", str(target), f"--inject={fault}")
    assert said.split() == [str(errno.EIO), str(target)]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("n", [1, 512, 1000, 4095])
def test_short_writes_and_reads_are_continued(tmp_path, monkeypatch, n):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(n, len(data) // 3)], at))
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: preadv(fd, [b[: max(n, len(b) // 3)] for b in bufs], at))
    array = bits((MIB + 57,), "<f4")
    path, record = save_shard(tmp_path, [to_write("a", array)])
    assert sha256(path) == record.sha256
    out = np.zeros(array.shape, "<f4")
    read_shard(path, record, [(record.blocks["a"][0], out)])
    assert same_bits(out, array)


class Interrupted(Exception):
    """What comes up in the middle of a save."""


def test_an_exception_in_the_middle_leaves_no_file_and_no_thread(tmp_path):
    copies = []

    def copy(lo, out):
        copies.append(lo)
        if len(copies) == 4:
            raise Interrupted
        out.fill(1)

    array = StreamedArray(np.dtype("u1"), (40 * MIB,), copy)
    with nothing_left_behind(tmp_path), pytest.raises(Interrupted):
        save_shard(tmp_path, [to_write("a", array, (0,), (40 * MIB,))])
    assert len(copies) == 4


def test_interrupts_at_any_moment_do_not_keep_the_process_and_the_next_save_works(tmp_path):
    program = f"""
import contextlib, signal
from pathlib import Path
from tests.storage_cases import *
class Interrupted(Exception): pass
def interrupt(*_): raise Interrupted
signal.signal(signal.SIGALRM, interrupt)
here, array = Path({str(tmp_path)!r}), bits((2 * MIB,), "<f4")
save_shard(here, [to_write("a", array)])  # Python's import, which this leads to, does not survive an interrupt
for i in range(60):
    with contextlib.suppress(Exception):  # Python's own locks may turn the interrupt into a RuntimeError
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0005 * i)
        save_shard(here, [to_write("a", array)])
        signal.setitimer(signal.ITIMER_REAL, 0)
    (here / "rank00000.h5.tmp").unlink(missing_ok=True)  # of a save that was interrupted in its cleaning up
path, record = save_shard(here, [to_write("a", array)])
assert sha256(path) == record.sha256
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert run.returncode == 0, run.stderr


def test_an_error_while_reading_leaves_no_thread_and_no_descriptor(tmp_path):
    path, record = save_shard(tmp_path, [to_write("a", np.ones(4 * MIB))])
    os.truncate(path, 10 * MIB)
    (block,) = record.blocks["a"]
    with nothing_left_behind(tmp_path), pytest.raises(CorruptShard):
        read_block(path, block, block.block, np.zeros(4 * MIB))


def test_many_saves_leave_no_descriptor_thread_or_memory_behind(tmp_path):
    array = np.ones(MIB // 8)
    save_shard(tmp_path, [to_write("a", array)])
    before = resident()
    with nothing_left_behind(tmp_path):
        for _ in range(200):
            save_shard(tmp_path, [to_write("a", array)])
    assert resident() - before < 8


def resident() -> float:
    """MiB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


@pytest.mark.parametrize("operation", ["write", "read full", "read quick", "hash"])
def test_a_shard_of_200_mb_takes_at_most_32_mib_more_memory(tmp_path, operation):
    program = f"""
import resource, sys, numpy as np, h5py
from pathlib import Path
from mpi_ckpt.storage import shard_file
from tests.storage_cases import save_shard, to_write
here = Path({str(tmp_path)!r})
array = np.ones((25_000, 1000))[:, :]
swapped = array.view(">f8").T
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
if {operation!r} == "write":
    before = peak()
    save_shard(here, [to_write("a", swapped)], b"x" * 1000)
else:
    path, record = save_shard(here, [to_write("a", array)])
    before = peak() - 12  # the buffers of the save serve again, and count
    if {operation!r} == "hash":
        shard_file.hash_file(path)
    else:
        shard_file.read_shard(path, record, [(record.blocks["a"][0], swapped.T)], {operation!r}.split()[-1])
print(peak() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert float(run.stdout) <= 32


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_file_systems_in_memory_work_too(tmp_path, kind, caplog):
    # ramfs refuses O_DIRECT at open.
    array = bits((3 * MIB + 57,), "<f2")
    direct._say_buffered.cache_clear()
    with mounted(tmp_path, kind, "mode=755"), caplog.at_level(logging.INFO, "mpi_ckpt"):
        for _ in range(2):
            path, record = save_shard(tmp_path, [to_write("a", array)])
            assert record.sha256 == sha256(path)
            for verify in ("full", "quick", "none"):
                out = np.zeros(array.shape, "<f2")
                read_shard(path, record, [(record.blocks["a"][0], out)], verify)
                assert same_bits(out, array)
    if kind == "ramfs":
        assert [record.levelname for record in caplog.records] == ["INFO"]  # said once
        assert "O_DIRECT" in caplog.text


def test_a_transfer_that_o_direct_refuses_goes_through_the_page_cache(tmp_path):
    data = bits((10_000,), "|u1")
    with direct.opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as fd:
        direct.write_all(fd, data, 7)  # aligned to nothing
        out = np.zeros(16384, np.uint8)
        assert direct.read_into(fd, out, 7, 10_000) == 10_000
        assert direct.read_into(fd, out, 5000, 10_000) == 5007
    assert (tmp_path / "file").read_bytes()[7:] == data.tobytes()


@needs_strace
def test_no_file_of_ours_is_ever_locked(tmp_path):
    # Some network file systems refuse ("unable to lock file"), and HDF5 would give up, whatever the setting below.
    code = """
import os
os.environ["HDF5_USE_FILE_LOCKING"] = "TRUE"
import numpy as np
from tests.storage_cases import *
from mpi_ckpt.storage.shard_file import read_shard
path, record = save_shard(here, [to_write("a", np.arange(57))])
out = np.zeros(57, int)
read_shard(path, record, [(record.blocks["a"][0], out)])
print(out.sum())
"""
    said, calls = under_strace(tmp_path, code, "--trace=flock,fcntl", "--inject=flock:error=ENOSYS")
    assert said.split() == [str(sum(range(57)))]
    assert any("F_SETFL" in call for call in calls)
    assert not [call for call in calls if call.startswith("flock") or "F_SETLK" in call or "F_OFD" in call]


def test_offsets_beyond_4_gib(tmp_path):
    """A sparse file as it would be laid out, filled through plain h5py at its far end, and read by offsets."""
    n, tail = (5 << 30) + 57, bits((300_000,), "<f4")
    image = lay_out([Dataset("/arrays/a", np.dtype("u1"), (n,)), Dataset("/arrays/b", np.dtype("<f4"), tail.shape)], {})
    path = tmp_path / "rank00000.h5"
    path.write_bytes(image.head)
    os.truncate(path, image.nbytes)
    with h5py.File(path, "r+") as file:
        file["arrays/a"][-1009:] = 7
        file["arrays/b"][...] = tail
        assert [file[f"arrays/{key}"].id.get_offset() for key in "ab"] == image.offsets
    assert image.offsets[1] > 5 << 30
    a = BlockRecord((3,), (n,), image.offsets[0], 0, "")
    out = np.zeros(2000, "u1")
    read_block(path, a, Block((3 + n - 2000,), (2000,)), out, "none")
    assert out.tolist() == [0] * 991 + [7] * 1009
    table = np.array([crc32c(tail.view("u1")[i : i + MIB]) for i in range(0, tail.nbytes, MIB)], "<u4")
    with path.open("ab") as file:
        file.write(table.tobytes())
    b = BlockRecord((0,), tail.shape, image.offsets[1], image.nbytes, f"{crc32c(table):08x}")
    whole = np.zeros(tail.shape, "<f4")
    read_block(path, b, b.block, whole)
    assert same_bits(whole, tail)


@slow
def test_a_shard_above_4_gib_comes_back(tmp_path):
    n = (1 << 30) + 1009
    array = np.broadcast_to(np.float32(1.5), (n,))  # one element of memory
    path, record = save_shard(tmp_path, [to_write("a", array), to_write("b", np.arange(57))])
    assert record.nbytes > 4 << 30
    assert hash_file(path) == (record.sha256, record.crc32c)
    (block,) = record.blocks["a"]
    out = np.zeros(1009, "<f4")
    read_block(path, block, Block((n - 1009,), (1009,)), out)
    assert (out == 1.5).all()
    read_block(path, record.blocks["b"][0], Block((0,), (57,)), out := np.zeros(57, "<i8"))
    assert out.tolist() == list(range(57))


def test_a_save_in_the_background_finishes_after_the_main_thread_has_ended(tmp_path):
    program = f"""
import threading, time, numpy as np
from pathlib import Path
from tests.storage_cases import save_shard, to_write
def work():
    time.sleep(0.3)
    save_shard(Path({str(tmp_path)!r}), [to_write("a", np.ones(57))])
threading.Thread(target=work).start()
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert os.listdir(tmp_path) == ["rank00000.h5"]


def test_several_threads_and_forked_children_save_at_once(tmp_path):
    save_shard(tmp_path, [to_write("a", np.ones(57))])  # so that a child inherits buffers

    def work(rank: int) -> None:
        array = bits((2 * MIB + rank,), "<f4", rank)
        for _ in range(3):
            path, record = save_shard(tmp_path, [to_write("a", array)], rank=rank, size=4)
            assert sha256(path) == record.sha256
            out = np.zeros(array.shape, "<f4")
            read_shard(path, record, [(record.blocks["a"][0], out)])
            assert same_bits(out, array)

    children = [multiprocessing.get_context("fork").Process(target=work, args=(rank,)) for rank in (0, 1)]
    failed: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failed.append(error)

    for child in children:
        child.start()
    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in (2, 3)]
    for thread in threads:
        thread.start()
    for each in [*threads, *children]:
        each.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    assert not failed
    assert len(staging._spare) == 1  # the buffers of one stream are kept, not of all four


@needs_strace
def test_a_shard_is_durable_before_it_is_published(tmp_path):
    code = "import numpy as np\nfrom tests.storage_cases import *\nsave_shard(here, [to_write('a', np.ones(700_000))])"
    _, calls = under_strace(tmp_path, code)
    written = [i for i, call in enumerate(calls) if call.startswith("pwrite64")]
    assert len(written) == 3  # 2 MiB, 2 MiB and the rest
    after = operations(calls[written[-1] :], tmp_path)
    shard = "rank00000.h5"
    assert after == [
        *(f"ftruncate {shard}.tmp", f"fsync {shard}.tmp", f"close {shard}.tmp"),
        *(f"rename {shard}.tmp {shard}", "fsync .", "close ."),
    ]


@pytest.mark.parametrize("module", ["names", "atomic", "manifest", "shard_file", "shard_read", "records"])
def test_the_room_knows_no_mpi_and_only_writing_loads_hdf5(module):
    check = f"import mpi_ckpt.storage.{module}, sys; assert not {{'mpi4py', 'h5py'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=HANG)
