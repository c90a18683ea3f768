"""The peers of saving and restoring, and the limits of the machine, each as fast as it goes.

Every function here saves or loads the same bytes as ours: one rank's arrays, by name. All that write end with an fsync
of every file. None but `save_h5py` hashes, none renames, and none makes a directory's entry durable.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from safetensors.numpy import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

PAGE = 4096
PIECE = 16 << 20  # bytes of one request of the raw limits
HASH_PIECE = 1 << 20
DCP_THREADS = 1  # a rank: with four ranks on two cores there is less than a core for each

Arrays = dict[str, np.ndarray]


# -- limits ------------------------------------------------------------------------------------------------------------


def page_aligned(nbytes: int) -> np.ndarray:
    """Touched memory, uint8 [nbytes], that begins on a page; huge pages, if there are any, as NumPy's arrays have."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    pages.fill(1)
    return pages


def joined(arrays: Arrays) -> np.ndarray:
    """The bytes of all arrays, page-aligned and padded to whole pages, as O_DIRECT wants them: uint8."""
    nbytes = sum(array.nbytes for array in arrays.values())
    buffer = page_aligned(-(-nbytes // PAGE) * PAGE)
    at = 0
    for array in arrays.values():
        buffer[at : at + array.nbytes] = array.view(np.uint8)
        at += array.nbytes
    return buffer


def write_raw(path: Path, data: np.ndarray, *, direct: bool, threads: int) -> None:
    """Write `data` (page-aligned, whole pages) by so many threads, and fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0), 0o666)
    _in_pieces(data.size, threads, lambda lo, hi: _all_of(os.pwrite(fd, data[lo:hi].data, lo), hi - lo))
    os.fsync(fd)
    os.close(fd)


def read_raw(path: Path, data: np.ndarray, *, direct: bool, threads: int) -> None:
    """Read as many bytes as `data` (page-aligned, whole pages) holds, by so many threads."""
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    _in_pieces(data.size, threads, lambda lo, hi: _all_of(os.preadv(fd, [data[lo:hi].data], lo), hi - lo))
    os.close(fd)


def hash_arrays(arrays: Arrays) -> None:
    """The sha256 of all arrays, from memory."""
    sha256 = hashlib.sha256()
    for array in arrays.values():
        sha256.update(array.view(np.uint8).data)
    sha256.digest()


def copy_arrays(arrays: Arrays, copies: Arrays) -> None:
    """memcpy: `arrays` to `copies`, whose pages have all been touched."""
    for key, array in arrays.items():
        np.copyto(copies[key], array)


def drop_from_cache(directory: Path) -> None:
    """Make the next read of every file below `directory` come from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _in_pieces(nbytes: int, threads: int, transfer: Callable[[int, int], None]) -> None:
    """transfer(lo, hi) for every piece, dealt out to so many threads. Raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            for lo in range(first * PIECE, nbytes, threads * PIECE):
                transfer(lo, min(lo + PIECE, nbytes))
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=run, args=(i,)) for i in range(1, threads)]
    for thread in others:
        thread.start()
    run(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def _all_of(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(f"a transfer of {wanted} bytes ended after {done}")


# -- peers that save ---------------------------------------------------------------------------------------------------


def save_h5py(path: Path, arrays: Arrays) -> str:
    """One plain HDF5 file a rank, fsync, and a second pass that hashes it (from the page cache); the sha256."""
    with h5py.File(path, "w") as file:
        for key, array in arrays.items():
            file.create_dataset(key, data=array)
    _fsync(path)
    sha256, buffer = hashlib.sha256(), memoryview(bytearray(HASH_PIECE))
    with open(path, "rb", buffering=0) as stream:
        while n := stream.readinto(buffer):
            sha256.update(buffer[:n])
    return sha256.hexdigest()


def save_gathered(path: Path, arrays: Arrays, comm: MPI.Comm) -> None:
    """**Collective.** All arrays to rank 0, which writes one file with torch.save and fsyncs it."""
    whole = {}
    for key, array in arrays.items():
        counts = comm.gather(array.size)
        if counts is None:
            comm.Gatherv(array.view(np.uint8), None)
        else:
            whole[key] = np.empty(sum(counts), array.dtype)
            comm.Gatherv(array.view(np.uint8), [whole[key].view(np.uint8), [n * array.itemsize for n in counts]])
    if comm.rank == 0:
        torch.save(tensors_of(whole), path)
        _fsync(path)


def save_torch(path: Path, arrays: Arrays) -> None:
    """torch.save, one file a rank."""
    torch.save(tensors_of(arrays), path)
    _fsync(path)


def save_safetensors(path: Path, arrays: Arrays) -> None:
    """safetensors, one file a rank."""
    save_file(arrays, path)
    _fsync(path)


def save_shared(path: Path, arrays: Arrays, comm: MPI.Comm) -> None:
    """**Collective.** One file of all ranks through MPI-IO: array after array, and rank after rank in each of them."""
    file = MPI.File.Open(comm, str(path), MPI.MODE_CREATE | MPI.MODE_WRONLY)
    end = 0
    for array in arrays.values():
        sizes = comm.allgather(array.nbytes)
        file.Write_at_all(end + sum(sizes[: comm.rank]), array.view(np.uint8))
        end += sum(sizes)
    file.Sync()
    file.Close()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


# -- PyTorch Distributed Checkpoint ------------------------------------------------------------------------------------
# Each rank has keys of its own, plain tensors that share the arrays' memory: no DTensor to plan for, nothing to
# deduplicate, one file a rank. That is the least work that DCP can be given for flat shards.


def tensors_of(arrays: Arrays) -> dict[str, torch.Tensor]:
    """The arrays as tensors on the same memory."""
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def dcp_state(arrays: Arrays, rank: int) -> dict[str, Any]:
    """What DCP saves for a rank."""
    return {f"rank{rank}/{key}": tensor for key, tensor in tensors_of(arrays).items()}


def dcp_save(path: Path, state: dict[str, Any]) -> None:
    """**Collective.** DCP's save, with an fsync of every file."""
    dcp.save(state, storage_writer=_dcp_writer(path))


def dcp_load(path: Path, state: dict[str, Any]) -> None:
    """**Collective.** DCP's load, in place."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))


def dcp_async_save(path: Path, state: dict[str, Any], stager: DefaultStager | None) -> Any:
    """**Collective.** DCP's async_save; a future."""
    return dcp.async_save(state, storage_writer=_dcp_writer(path), async_stager=stager)


def dcp_stager() -> DefaultStager:
    """A stager for processors. Kept from save to save it copies to memory that it has already touched."""
    return DefaultStager(StagingOptions(False, False, False, False))


def _dcp_writer(path: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, sync_files=True, thread_count=DCP_THREADS)
