"""The data x tensor mesh: who sits where, which splits are refused, and sums with the same bits on all tensor ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpi_ckpt.errors import WorldSizeMismatch
from mpi_ckpt.parallel.mesh import Mesh, MeshError
from mpi_ckpt.parallel.tensor import LocalPart, Piece, TensorGroup, merged
from tests.ranks import error_of, same_everywhere


@pytest.mark.mpi(ranks=[1, 2, 4, 6], timeout=60, unit="s")
def test_tensor_ranks_are_neighbours_and_data_ranks_hold_the_same_part(comm):
    for tensor_ranks in (t for t in range(1, comm.size + 1) if comm.size % t == 0):
        mesh = Mesh(comm, tensor_ranks)
        assert mesh.shape == {"data": comm.size // tensor_ranks, "tensor": tensor_ranks}
        assert (mesh.data.rank, mesh.tensor.rank) == divmod(comm.rank, tensor_ranks)
        assert mesh.data.allgather(comm.rank) == list(range(mesh.tensor.rank, comm.size, tensor_ranks))
        row = np.zeros(comm.size)
        row[comm.rank] = 1.0
        mesh.tensor.allreduce(row)
        first = comm.rank - mesh.tensor.rank
        assert np.flatnonzero(row).tolist() == list(range(first, first + tensor_ranks))
        mesh.close()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_split_that_does_not_come_out_even_is_refused_by_name_on_every_rank(comm):
    for tensor_ranks in (0, 3, 8):
        error = error_of(comm, MeshError, lambda wanted=tensor_ranks: Mesh(comm, wanted))
        assert f"tensor_parallel {tensor_ranks} on 4 ranks" in str(error)
        assert "--tensor-parallel" in str(error)
    mesh = Mesh(comm, 4)
    error = error_of(comm, MeshError, lambda: mesh.check_model(n_head=6))
    assert "found n_head 6, tensor_parallel 4" in str(error)
    mesh.check_model(n_head=8)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_the_checkpoint_of_another_mesh_is_refused_with_both_ways_out(comm):
    mesh = Mesh(comm, 2)
    error = error_of(comm, WorldSizeMismatch, lambda: mesh.check_saved({"data": 4, "tensor": 1}))
    assert "found 4 data x 1 tensor ranks in the checkpoint; expected 2 data x 2 tensor ranks" in str(error)
    assert "--tensor-parallel 1" in str(error)
    assert "--elastic" in str(error)
    mesh.check_saved({"tensor": 2, "data": 2})


@pytest.mark.mpi(ranks=[2, 3, 4], timeout=60, unit="s")
def test_an_allreduce_gives_all_tensor_ranks_the_same_bits_and_the_right_sum(comm):
    group = TensorGroup(comm)
    sizes = (1, 7, 2_000, 70_001, 400_000)  # MPI libraries change their algorithm with the size
    for size, dtype in itertools.product(sizes, (np.float32, np.float64)):
        parts = [np.random.default_rng([size, r]).standard_normal(size).astype(dtype) for r in range(comm.size)]
        mine = parts[comm.rank].copy().reshape(1, -1)
        group.allreduce(mine)
        same_everywhere(comm, mine.tobytes())
        np.testing.assert_allclose(mine[0], np.sum(parts, axis=0), rtol=1e-5, atol=1e-5)
    assert group.watch.seconds > 0


def test_one_rank_alone_sums_nothing_and_spends_no_time_in_it():
    group, values = TensorGroup(), np.arange(5.0)
    group.allreduce(values)
    group.broadcast(values)
    assert values.tolist() == [0, 1, 2, 3, 4]
    assert (group.rank, group.size, group.watch.seconds) == (0, 1, 0.0)


def test_a_local_part_is_cut_and_joined_without_losing_an_element():
    part = LocalPart(100, [(0, 10, True), (10, 5, False), (40, 5, False), (45, 10, True)])
    assert part.size == 30
    for start in range(31):
        for stop in range(start, 31):
            pieces = part.within(start, stop)
            assert [i for p in pieces for i in range(p.local, p.local + p.size)] == list(range(stop - start))
            whole = [i for p in merged(pieces) for i in range(p.whole, p.whole + p.size)]
            assert whole == [*range(15), *range(40, 55)][start:stop]
    assert merged(part.within(0, 30)) == [Piece(0, 0, 15, False), Piece(15, 40, 15, False)]


@pytest.mark.parametrize("tensor_parallel", ["3", "0"])
def test_the_program_refuses_an_uneven_mesh_with_the_status_of_bad_usage(launch, tensor_parallel):
    outcome = launch.train(4, "--run-dir", "run", "--tensor-parallel", tensor_parallel)
    assert outcome.status == 2
    assert "tensor" in outcome.stderr
    assert not (launch.cwd / "run").exists()


def test_the_program_refuses_heads_that_cannot_be_dealt_before_it_stores_a_run(launch):
    outcome = launch.train(4, "--run-dir", "run", "--tensor-parallel", "4", "--n-head", "2")
    assert outcome.status == 2
    assert outcome.stderr.count("found n_head 2, tensor_parallel 4") == 4
    assert not (launch.cwd / "run" / "run.json").exists()
