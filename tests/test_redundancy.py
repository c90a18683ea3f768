"""Redundancy without MPI: who protects whom, what is stored where, and what comes back after every possible loss."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_ckpt.comm.combination import Combination
from mpi_ckpt.comm.exchange import Port, exchange
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy import coder, galois, planner
from mpi_ckpt.redundancy.groups import form_groups, shortfall, surviving_losses
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.scheme import Scheme

SCHEMES = ("partner", "xor", "rs:1+1", "rs:2+2", "rs:3+2", "rs:4+2", "rs:1+3", "rs:3+3")

# -- schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tolerance", "stored"),
    [("single", 0, 840), ("partner", 1, 1680), ("xor", 1, 840 + 120), ("rs:4+2", 2, 840 + 420), ("rs:6+3", 3, 1260)],
)
def test_a_scheme_says_what_it_costs_and_survives(text, tolerance, stored):
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert (scheme.tolerance, scheme.stored_bytes(840)) == (tolerance, stored)


def test_a_smaller_group_costs_what_it_costs():
    assert Scheme.parse("xor").stored_bytes(900, members=4) == 900 + 300
    assert Scheme.parse("rs:4+2").stored_bytes(900, members=5) == 900 + 600


@pytest.mark.parametrize(
    "text", ["", "XOR", "rs", "rs:4", "rs:0+2", "rs:4+0", "rs:4+2 ", "rs:100+29", "rs:04+2", "raid"]
)
def test_what_is_no_scheme_is_refused_with_the_list_of_those_there_are(text):
    with pytest.raises(CheckpointError, match=r"expected one of single, partner, xor, rs:k\+m") as caught:
        Scheme.parse(text)
    assert repr(text) in str(caught.value)


# -- groups ------------------------------------------------------------------------------------------------------------

placements = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40)


@given(placements, st.sampled_from(SCHEMES))
@settings(deadline=None, max_examples=300)
def test_every_rank_is_in_one_group_that_survives_what_is_promised(domains, text):
    scheme = Scheme.parse(text)
    try:
        grouping = form_groups(scheme, domains)
    except CheckpointError:
        fullest = max(Counter(domains).values())  # with groups of m + 1, m of one domain, there would be too few ranks
        groups = -(-fullest // scheme.parities)
        assert len(set(domains)) == 1 or len(domains) // groups <= scheme.parities
        return
    assert sorted(itertools.chain(*grouping.groups)) == list(range(len(domains)))
    assert 1 <= grouping.tolerance <= scheme.tolerance
    for group in grouping.groups:
        assert scheme.parities < len(group) < 2 * scheme.size
        shared = max(Counter(domains[rank] for rank in group).values())
        assert shared * grouping.tolerance <= scheme.parities
        assert surviving_losses(scheme, [domains[rank] for rank in group]) >= grouping.tolerance
    if grouping.tolerance == scheme.tolerance > 1 or scheme.parities == 1:
        assert all(len({domains[rank] for rank in group}) == len(group) for group in grouping.groups)
    assert form_groups(scheme, list(domains)) == grouping


@given(st.integers(2, 12), st.integers(1, 4), st.sampled_from(SCHEMES))
@settings(deadline=None)
def test_on_evenly_filled_nodes_the_promise_holds_in_full(nodes, ranks_per_node, text):
    scheme = Scheme.parse(text)
    if nodes <= scheme.parities:
        return
    grouping = form_groups(scheme, [f"n{rank // ranks_per_node:02d}" for rank in range(nodes * ranks_per_node)])
    assert grouping.tolerance == scheme.tolerance
    if nodes >= scheme.size:
        assert min(map(len, grouping.groups)) >= scheme.size, "costs more than the scheme says"


def test_partners_of_four_nodes_pair_whole_nodes():
    assert form_groups(Scheme.parse("partner"), [*"aabbccdd"]).groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_uneven_nodes_are_protected_while_no_domain_has_more_than_its_share():
    grouping = form_groups(Scheme.parse("xor"), [*"aaabbc"])
    assert grouping.groups == ((0, 3), (1, 4), (2, 5))


@pytest.mark.parametrize("text", SCHEMES)
def test_all_ranks_on_one_node_is_an_error_that_says_so(text):
    with pytest.raises(CheckpointError, match="all ranks run in one failure domain") as caught:
        form_groups(Scheme.parse(text), ["here"] * 8)
    assert "8 of 8 ranks in 'here'" in str(caught.value)


def test_a_domain_that_outweighs_the_others_is_an_error_that_names_it():
    with pytest.raises(CheckpointError, match="3 of 5 ranks in 'fat', 3 domains"):
        form_groups(Scheme.parse("xor"), ["fat", "thin", "fat", "thick", "fat"])


def test_two_parities_let_two_members_share_a_node_for_a_smaller_tolerance_that_is_stated():
    grouping = form_groups(Scheme.parse("rs:2+2"), [*"aabb"])
    assert grouping == type(grouping)(((0, 1, 2, 3),), tolerance=1)


@pytest.mark.parametrize(
    ("text", "domains", "said"),
    [
        ("rs:4+2", "aabbcc", ["groups of 3 ranks", "2 of these may be lost at once,", "200 % of", "not 50 %"]),
        (
            "rs:2+2",
            "aabb",
            ["groups of 4 ranks", "1 of these may be lost at once, not 2", "100 % of the bytes of the data"],
        ),
    ],
)
def test_groups_that_fall_short_of_the_scheme_are_told_by_what_they_survive_and_cost(text, domains, said):
    """m parities in a group of n cost m / (n - m) of the data: 2 / 1, 2 / 4 and 2 / 2."""
    scheme = Scheme.parse(text)
    told = shortfall(scheme, form_groups(scheme, [*domains]))
    assert all(part in told for part in said), told


@pytest.mark.parametrize(
    ("text", "domains"), [("rs:4+2", "abcdef"), ("xor", "ab"), ("partner", "abc"), ("single", "aa")]
)
def test_groups_that_are_what_the_scheme_promises_need_no_telling(text, domains):
    scheme = Scheme.parse(text)
    assert shortfall(scheme, form_groups(scheme, [*domains])) is None


# -- arithmetic --------------------------------------------------------------------------------------------------------


def slow_product(a: int, b: int) -> int:
    """Multiplication of polynomials over GF(2) modulo 0x11d, bit by bit."""
    result = 0
    for bit in range(8):
        result ^= (b >> bit & 1) * (a << bit)
    for bit in range(15, 7, -1):
        result ^= (result >> bit & 1) * (0x11D << (bit - 8))
    return result


def test_products_are_those_of_the_field():
    expected = [[slow_product(a, b) for b in range(256)] for a in range(256)]
    assert (galois.products() == np.array(expected)).all()
    assert all(slow_product(a, int(galois.inverses()[a])) == 1 for a in range(1, 256))


@pytest.mark.parametrize(("k", "m"), [(1, 1), (4, 1), (4, 2), (3, 3), (6, 4), (2, 5)])
def test_any_k_pieces_give_all_others(k, m):
    for known in itertools.combinations(range(k + m), k):
        wanted = [i for i in range(k + m) if i not in known]
        rows = galois.generator(k, m)
        assert (galois.multiply(galois.recovery(k, m, known, wanted), rows[list(known)]) == rows[wanted]).all()


@pytest.mark.skipif(coder.library() is None, reason="no ISA-L here")
@given(st.integers(1, 10), st.integers(0, 700), st.integers(0, 2**32), st.booleans())
@settings(deadline=None)
def test_isa_l_and_the_tables_agree_bit_for_bit(k, size, seed, large):
    rng = np.random.default_rng(seed)
    size += large * (coder.BLOCK + 1)
    inputs = [rng.integers(0, 256, size + 3, np.uint8)[3:] for _ in range(k)]
    factors = [2, *rng.integers(0, 256, k - 1).tolist()]
    by_library, by_tables = np.full(size, 7, np.uint8), np.full(size, 9, np.uint8)
    coder.combine(by_library, factors, inputs)
    coder.combine_by_tables(by_tables, factors, inputs)
    assert (by_library == by_tables).all()


@pytest.mark.skipif(coder.library() is None, reason="no ISA-L here")
def test_the_generator_is_isa_l_s():
    import ctypes

    for k, m in ((4, 2), (10, 4)):
        room = ctypes.create_string_buffer((k + m) * k)
        coder.library().gf_gen_cauchy1_matrix(room, k + m, k)
        assert galois.generator(k, m).tobytes() == room.raw


@given(st.lists(st.integers(0, 600), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**32))
@settings(deadline=None)
def test_shorter_inputs_are_followed_by_zeros(sizes, plain, seed):
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    factors = [1] * len(sizes) if plain else rng.integers(0, 256, len(sizes)).tolist()
    longest = max(sizes)
    expected = np.zeros(longest, np.uint8)
    for factor, data in zip(factors, inputs, strict=True):
        expected[: data.size] ^= galois.products()[factor][data]
    out = np.full(longest, 5, np.uint8)
    coder.combine(out, factors, inputs)
    assert (out == expected).all()


def test_without_the_library_the_same_bytes_come_out(monkeypatch):
    inputs = [np.arange(i, i + 100, dtype=np.uint8) for i in range(3)]
    with_it, without = np.empty(100, np.uint8), np.empty(100, np.uint8)
    coder.combine(with_it, [3, 1, 200], inputs)
    monkeypatch.setattr(coder, "library", lambda: None)
    coder.combine(without, [3, 1, 200], inputs)
    assert (with_it == without).all()


# -- every loss --------------------------------------------------------------------------------------------------------


def carry_out(combinations, files):
    """The exchange in one process: `files` maps a MemberFile to its bytes, and gets the targets."""
    for combination in combinations:
        inputs = [files[p.file][p.offset : p.offset + p.nbytes] if p.nbytes else EMPTY for p in combination.sources]
        for part, row in zip(combination.targets, combination.factors, strict=True):
            if not part.nbytes:
                continue
            out = np.empty(part.nbytes, np.uint8)
            coder.combine(out, row, [data[: part.nbytes] for data in inputs])
            old = files.get(part.file, EMPTY)
            new = np.zeros(max(old.size, part.offset + part.nbytes), np.uint8)
            new[: old.size] = old
            new[part.offset : part.offset + part.nbytes] = out
            files[part.file] = new


EMPTY = np.empty(0, np.uint8)
GROUPS = [
    *[(text, n) for text in ("partner", "xor") for n in range(2, 7)],
    *[(f"rs:{n - m}+{m}", n) for n in range(2, 7) for m in range(1, n)],
    *[("single", n) for n in range(1, 7)],
]


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "uneven"])
@pytest.mark.parametrize(("text", "n"), GROUPS)
def test_every_loss_within_the_scheme_comes_back_bitwise_and_every_other_one_is_told(text, n, equal):
    rng = np.random.default_rng(n)
    sizes = [20_000] * n if equal else [(0, 13_000, 50_001, 4096, 1, 9000)[(j + n) % 6] for j in range(n)]
    scheme = Scheme.parse(text)
    files = {MemberFile(j, DATA): rng.integers(0, 256, size, np.uint8) for j, size in enumerate(sizes)}
    carry_out(planner.encode(scheme, sizes), files)
    for count in range(n + 1):
        for lost in itertools.combinations(range(n), count):
            left = {file: data for file, data in files.items() if file.member not in lost}
            plan = planner.rebuild(scheme, sizes, left.keys())
            if scheme.kind == "partner":
                hopeless = tuple(j for j in lost if (j + 1) % n in lost and sizes[j])
            else:
                hopeless = () if count <= scheme.tolerance else tuple(j for j in lost if sizes[j])
            if equal:
                assert plan.lost == hopeless
            assert {*plan.lost} <= {*hopeless}
            if not plan.lost:
                carry_out(plan.combinations, left)
                assert all((left.get(file, EMPTY) == data).all() for file, data in files.items())


@given(st.sampled_from(["partner", "xor", "rs:2+2", "rs:1+3"]), st.data())
@settings(deadline=None, max_examples=30)
def test_the_exchange_does_the_same_in_one_process_without_mpi(text, data):
    scheme = Scheme.parse(text)
    n = data.draw(st.integers(scheme.parities + 1, 5))
    sizes = data.draw(st.lists(st.integers(0, 3_000_000), min_size=n, max_size=n))
    lost = data.draw(st.sets(st.integers(0, n - 1), max_size=scheme.parities))
    rng = np.random.default_rng(sum(sizes))
    files = {MemberFile(j, DATA): rng.integers(0, 256, size, np.uint8) for j, size in enumerate(sizes)}
    carry_out(planner.encode(scheme, sizes), files)
    found = {file: part if file.member not in lost else np.zeros_like(part) for file, part in files.items()}
    held = [file for file in files if file.member not in lost]
    in_memory = data.draw(st.sampled_from([None, DATA, PARITY]))
    in_one_process(planner.rebuild(scheme, sizes, held).combinations, found, in_memory)
    assert all((found[file] == part).all() for file, part in files.items())


def in_one_process(combinations, files, in_memory):
    """The exchange of the product, between arrays; files of the kind `in_memory` are not read, but seen."""

    def done(copy):
        copy()
        future = Future()
        future.set_result(None)
        return future

    def of(part, lo, n):
        return files[part.file][part.offset + lo : part.offset + lo + n]

    port = Port(
        view=lambda part, lo, n: of(part, lo, n) if part.file.kind == in_memory else None,
        read=lambda part, lo, buffer, n: done(lambda: np.copyto(buffer[:n], of(part, lo, n))),
        write=lambda part, lo, buffer, n: done(lambda: np.copyto(of(part, lo, n), buffer[:n])),
        combine=coder.combine,
    )
    here = [
        Combination(*(tuple(replace(p, rank=0) for p in parts) for parts in (c.sources, c.targets)), c.factors)
        for c in combinations
    ]
    exchange(None, here, port, timeout=1)


def test_a_lost_parity_file_alone_and_a_lost_data_file_alone_come_back():
    scheme, sizes = Scheme.parse("rs:2+2"), [10_000, 20_000, 30_000, 7]
    files = {MemberFile(j, DATA): np.full(size, j + 1, np.uint8) for j, size in enumerate(sizes)}
    carry_out(planner.encode(scheme, sizes), files)
    for gone in itertools.combinations(files, 2):
        left = {file: data for file, data in files.items() if file not in gone}
        plan = planner.rebuild(scheme, sizes, left.keys())
        assert plan.lost == ()
        carry_out(plan.combinations, left)
        assert all((left[file] == data).all() for file, data in files.items())


@given(st.integers(2, 9), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_parity_is_spread_so_that_each_member_holds_its_share_and_one_piece_a_stripe(n, m, data):
    if n <= m:
        return
    scheme = Scheme("rs", n, m)
    sizes = data.draw(st.lists(st.integers(0, 10**12), min_size=n, max_size=n))
    found = planner.stripes(scheme, sizes)
    for stripe in found:
        assert sorted(part.rank for part in (*stripe.data, *stripe.parity)) == list(range(n))
    for j, size in enumerate(sizes):
        mine = [part for stripe in found for part in stripe.data if part.rank == j]
        assert sum(part.nbytes for part in mine) == size, "a byte is in no stripe, or in two"
        parity = planner.parity_parts(scheme, sizes, j)
        assert sum(part.nbytes for part in parity) <= m * planner.segment_bytes(scheme, sizes)
        assert all(part.file == MemberFile(j, PARITY) for part in parity)
    assert planner.segment_bytes(scheme, sizes) <= max(sizes) / (n - m) + 4096
