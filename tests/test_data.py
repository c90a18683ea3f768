"""The data room: a corpus that never changes, files that are mapped, and samples that do not know the rank count."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_ckpt.layout import shard_range
from mpi_ckpt.train.config import ConfigError
from mpi_ckpt.train.corpus import MIB, DataIdentity, make_corpus, open_corpus
from mpi_ckpt.train.data import BLOCK, Dataset, open_dataset, permute, sample_ids

SIZES = [1, 2, 3, 7, 57, 1009, 30080]


def dataset(n_samples: int, seq_len: int = 4, seed: int = 0) -> Dataset:
    """`n_samples` windows in which every token says where it stands."""
    tokens = np.arange(n_samples * seq_len + 1, dtype=np.uint16)
    return Dataset(tokens, seq_len, seed, vocab_size=1 << 16, name="positions")


# The synthetic corpus


def test_the_corpus_is_the_same_for_ever():
    corpus = make_corpus(0, 10_000)
    assert corpus.dtype == np.uint16
    assert corpus.shape == (10_000,)
    assert (
        hashlib.sha256(corpus.astype("<u2").tobytes()).hexdigest()
        == "fecb4a12c143829367bac731367a15bf48bade8b0a4a03ce88f96d0b0dc1ca2a"
    )


@given(st.integers(0, 2**70), st.integers(0, 3000), st.integers(0, 3000), st.integers(2, 300))
@settings(max_examples=50, deadline=None)
def test_a_longer_corpus_only_continues_a_shorter_one(seed, a, b, vocab_size):
    short, long = sorted((a, b))
    corpus = make_corpus(seed, long, vocab_size)
    assert len(corpus) == long
    assert (corpus < vocab_size).all()
    np.testing.assert_array_equal(corpus[:short], make_corpus(seed, short, vocab_size))


def test_another_seed_is_another_corpus():
    assert len({make_corpus(seed, 1000).tobytes() for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", range(5))
def test_the_next_token_can_be_learned_from_the_tokens_before_it(seed):
    """Conditional entropy by counting, in nats: ln 64 = 4.16, but 3.2 without context, 2 with one token, 1 with two."""
    corpus = make_corpus(seed, 200_000).astype(np.int64)

    def entropy(order: int) -> float:
        context = sum(corpus[k : len(corpus) - order + k] * 64 ** (order - 1 - k) for k in range(order))
        _, joint = np.unique(context * 64 + corpus[order:], return_counts=True)
        _, alone = np.unique(context + np.zeros_like(corpus[order:]), return_counts=True)
        total = joint.sum()
        return float((alone * np.log(alone)).sum() - (joint * np.log(joint)).sum()) / total

    none, one, two = entropy(0), entropy(1), entropy(2)
    assert 2.5 < none < 3.6
    assert 0.5 < one < none - 0.7
    assert 0.2 < two < one - 0.3


@pytest.mark.parametrize(("seed", "total", "vocab"), [(-1, 10, 64), (0, -1, 64), (0, 10, 1), (0, 10, 65537)])
def test_a_corpus_that_cannot_be_is_refused_by_the_name_of_its_setting(seed, total, vocab):
    with pytest.raises(ConfigError, match="cannot be used"):
        make_corpus(seed, total, vocab)


# Files


def test_text_is_read_as_bytes_and_bin_as_uint16(tmp_path):
    (tmp_path / "a.txt").write_bytes("Größe".encode())
    (tmp_path / "a.bin").write_bytes(b"\x01\x02\xff\x00")
    assert open_corpus(str(tmp_path / "a.txt"), 256).tolist() == list("Größe".encode())
    assert open_corpus(str(tmp_path / "a.bin"), 1024).tolist() == [513, 255]


def test_a_file_is_mapped_and_not_read_whole(tmp_path):
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(256 * MIB)
    program = f"""
import mpi_ckpt.train.data as data
rss = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024
before = rss()
dataset = data.open_dataset({str(path)!r}, 16, 0, vocab_size=64, total_tokens=0)
for step in range(20):
    dataset.batch(16 * step, 16, 0, 1)
print(dataset.samples_per_epoch, rss() - before)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=99, check=True).stdout
    samples, grown_mib = map(int, out.split())
    assert samples == (128 * MIB - 1) // 16
    assert grown_mib < 64  # 320 scattered samples bring 64 KiB each at most, of 256 MiB


@pytest.mark.parametrize(
    ("name", "content", "vocab", "says"),
    [
        ("empty.txt", b"", 256, "0 bytes"),
        ("odd.bin", b"\0" * 101, 64, "101 bytes; expected a positive multiple of 2 bytes"),
        ("text.txt", b"abc" * 99, 64, "vocab_size 64; expected 256"),
        ("short.txt", b"a" * 16, 256, "16 tokens; expected at least 17"),
        ("gpt2.bin", np.array([3, 4, 50256, 9] * 9, "<u2").tobytes(), 64, "token 50256 at position 2"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_found_and_expected(tmp_path, name, content, vocab, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        open_dataset(str(tmp_path / name), 16, 0, vocab_size=vocab, total_tokens=0)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["missing.txt", "directory"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name):
    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        open_dataset(str(tmp_path / name), 16, 0, vocab_size=256, total_tokens=0)
    assert str(tmp_path / name) in str(caught.value)


def test_a_token_outside_the_vocabulary_in_the_middle_of_a_file_is_refused_where_it_is_used(tmp_path):
    tokens = np.zeros(3 * MIB, "<u2")  # 6 MiB: head and tail do not hold the middle
    tokens[1_500_007] = 64
    path = tmp_path / "middle.bin"
    path.write_bytes(tokens.tobytes())
    data = open_dataset(str(path), 1 << 18, 0, vocab_size=64, total_tokens=0)
    with pytest.raises(
        ConfigError, match=r"middle\.bin.*token 64 at position 1500007; expected tokens below vocab_size 64"
    ):
        data.batch(0, data.samples_per_epoch, 0, 1)


def test_the_largest_token_is_refused_under_a_vocabulary_one_too_small():
    data = Dataset(np.full(9, 65535, np.uint16), 4, 0, vocab_size=65535, name="largest")
    with pytest.raises(ConfigError, match="token 65535"):
        data.batch(0, 1, 0, 1)


def test_no_byte_is_refused_under_a_vocabulary_of_256(tmp_path):
    (tmp_path / "all.dat").write_bytes(bytes(range(256)))
    data = open_dataset(str(tmp_path / "all.dat"), 5, 0, vocab_size=256, total_tokens=0)
    assert sorted(data.batch(0, 51, 0, 1)[0].ravel().tolist()) == list(range(255))


# Identity


def test_the_identity_is_the_sha256_of_head_and_tail(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 3 * MIB + 7, dtype=np.uint8).tobytes()
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    identity = open_dataset(str(path), 16, 0, vocab_size=256, total_tokens=0).identity
    assert identity.nbytes == 3 * MIB + 7
    assert identity.sha256 == hashlib.sha256(content[:MIB] + content[-MIB:]).hexdigest()


@pytest.mark.parametrize("change", ["first byte", "last byte", "one more", "one less", "other tokens"])
def test_a_changed_file_is_refused_by_name(tmp_path, change):
    path = tmp_path / "text.txt"
    content = bytearray(b"to be or not to be, " * (MIB // 10))
    path.write_bytes(content)
    stored = open_dataset(str(path), 16, 0, vocab_size=256, total_tokens=0).identity
    if change == "other tokens":
        path = path.rename(tmp_path / "text.bin")
    else:
        {
            "first byte": lambda: content.__setitem__(0, 1),
            "last byte": lambda: content.__setitem__(-1, 1),
            "one more": lambda: content.append(32),
            "one less": lambda: content.pop(),
        }[change]()
        path.write_bytes(content)
    now = open_dataset(str(path), 16, 0, vocab_size=1 << 16, total_tokens=0).identity
    with pytest.raises(ConfigError, match="not those that the run was started with") as caught:
        now.check_unchanged(stored)
    assert str(path) in str(caught.value)
    assert stored.sha256 in caught.value.expected


def test_a_file_that_grew_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "zeros.bin"
    identities = []
    for size in (3 * MIB, 4 * MIB):
        path.write_bytes(bytes(size))
        identities.append(open_dataset(str(path), 16, 0, vocab_size=64, total_tokens=0).identity)
    assert identities[0].sha256 == identities[1].sha256
    with pytest.raises(ConfigError, match=r"4194304 bytes.*; expected 3145728 bytes"):
        identities[1].check_unchanged(identities[0])


def test_a_moved_file_is_the_same_data(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc" * 99)
    stored = open_dataset(str(tmp_path / "a.txt"), 16, 0, vocab_size=256, total_tokens=0).identity
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    open_dataset(str(tmp_path / "b.txt"), 16, 0, vocab_size=256, total_tokens=0).identity.check_unchanged(stored)


def test_synthetic_text_of_another_seed_or_length_is_other_data():
    identity = open_dataset(None, 16, 0, vocab_size=64, total_tokens=1000).identity
    for seed, total in [(1, 1000), (0, 1001)]:
        other = open_dataset(None, 16, seed, vocab_size=64, total_tokens=total).identity
        with pytest.raises(ConfigError, match="synthetic text, seed 0"):
            other.check_unchanged(identity)
    open_dataset(None, 16, 0, vocab_size=64, total_tokens=1000).identity.check_unchanged(identity)


def test_an_identity_is_plain_json_values():
    identity = open_dataset(None, 16, 0, vocab_size=64, total_tokens=1000).identity
    assert DataIdentity(**vars(identity)) == identity
    assert {type(value) for value in vars(identity).values()} == {str, int}


# The order


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("epoch", [0, 1, 10**6])
def test_an_epochs_order_is_a_permutation(n, epoch):
    assert sorted(permute(np.arange(n), n, 7, epoch).tolist()) == list(range(n))


@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_an_epochs_order_is_a_permutation_of_any_size_under_any_key(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [10**9, 2**40 + 1, 2**62])
def test_the_order_of_a_huge_data_set_needs_memory_for_what_is_asked_only(n):
    ids = permute(np.arange(n - 1000, n), n, 0, 0)
    assert len(set(ids.tolist())) == 1000
    assert ids.min() >= 0
    assert ids.max() < n


def test_the_order_is_the_same_for_ever():
    """A resume in a year continues this order: known values, to be changed never."""
    assert permute(np.arange(8), 1009, 0, 0).tolist() == [826, 336, 892, 917, 400, 154, 394, 282]
    assert permute(np.arange(3), 30080, 0, 0).tolist() == [24342, 6340, 29538]


def test_the_order_depends_on_seed_and_epoch_and_not_on_what_is_asked_together():
    orders = {tuple(permute(np.arange(57), 57, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    whole = permute(np.arange(57), 57, 3, 1)
    assert [permute(np.array([p]), 57, 3, 1)[0] for p in range(57)] == whole.tolist()


def test_every_place_of_the_order_is_equally_likely_to_get_every_sample():
    """Chi-squared of 57 x 57 counts over 2000 keys: about 1 a degree of freedom, 0.025 its standard deviation."""
    n, keys = 57, 2000
    count = np.zeros((n, n))
    for seed in range(keys):
        count[np.arange(n), permute(np.arange(n), n, seed, 0)] += 1
    chi_squared = float(((count - keys / n) ** 2).sum() / (keys / n))
    assert chi_squared / (n - 1) ** 2 == pytest.approx(1, abs=0.125)


# The cursor


@given(st.integers(1, 300), st.integers(0, 10**12), st.lists(st.integers(0, 400), max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_stretch_of_samples_does_not_depend_on_how_it_is_cut(n, cursor, counts):
    parts = [sample_ids(cursor + sum(counts[:i]), c, n, 5) for i, c in enumerate(counts)]
    np.testing.assert_array_equal(
        np.concatenate([*parts, np.empty(0, np.int64)]), sample_ids(cursor, sum(counts), n, 5)
    )


@pytest.mark.parametrize("n", SIZES)
def test_every_epoch_has_its_own_order(n):
    epochs = sample_ids(0, 3 * n, n, 0).reshape(3, n)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(n))
    if n > 7:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3


@given(st.integers(50, 3 * BLOCK), st.integers(0, 6 * BLOCK), st.integers(0, BLOCK + 50))
@settings(max_examples=50, deadline=None)
def test_the_samples_are_those_of_the_order_position_by_position(n, cursor, count):
    ids = sample_ids(cursor, count, n, 0)
    for i in {0, count // 2, count - 1} & set(range(count)):
        epoch, place = divmod(cursor + i, n)
        assert ids[i] == permute(np.array([place]), n, 0, epoch)[0]


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_sample_comes_once_an_epoch_over_resumes_on_4_then_3_then_6_ranks(data):
    n = data.draw(st.sampled_from([1, 2, 3, 7, 57, 211]), label="samples")
    global_batch = data.draw(st.integers(1, 23), label="global batch")
    seen: list[int] = []
    cursor = 0
    for size in (4, 3, 6):
        ranks = [dataset(n) for _ in range(size)]  # a launch: nothing but the cursor comes from the one before
        steps = data.draw(st.integers(1, 1 + 2 * n // global_batch), label="steps")
        if size == 6:
            steps = max(1, -(-(3 * n - cursor) // global_batch))
        for _ in range(steps):
            for rank in range(size):
                inputs, _ = ranks[rank].batch(cursor, global_batch, rank, size)
                seen += (inputs[:, 0] // 4).tolist()
            cursor += global_batch
    assert len(seen) == cursor >= 3 * n
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert seen == sample_ids(0, cursor, n, 0).tolist()


# Batches


def test_targets_are_the_inputs_shifted_by_one():
    data = dataset(7, seq_len=5)
    inputs, targets = data.batch(0, 7, 0, 1)
    assert inputs.shape == targets.shape == (7, 5)
    np.testing.assert_array_equal(targets, inputs + 1)
    assert sorted(inputs.ravel().tolist()) == list(range(35))  # no token is read by two samples, none is left out


@given(st.integers(0, 50), st.integers(0, 20), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_ranks_share_the_global_batch_as_one_rank_would_read_it(cursor, global_batch, size):
    whole = dataset(11).batch(cursor, global_batch, 0, 1)
    parts = [dataset(11).batch(cursor, global_batch, rank, size) for rank in range(size)]
    for rank, (inputs, _) in enumerate(parts):
        start, stop = shard_range(global_batch, size, rank)
        assert inputs.shape == (stop - start, 4)
    for side in (0, 1):
        np.testing.assert_array_equal(np.concatenate([part[side] for part in parts]), whole[side])


def test_a_step_reuses_the_buffers_of_the_step_before():
    data = dataset(57)
    first = data.batch(0, 8, 0, 2)
    second = data.batch(8, 8, 0, 2)
    assert first[0] is second[0]
    assert first[1] is second[1]
    assert first[0].flags.c_contiguous
    assert first[0].dtype == np.int64
