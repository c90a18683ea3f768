"""Which samples a step trains on: a pure function of (seed, epoch, global sample index), so never of the rank count.

A corpus of n tokens holds `(n - 1) // T` samples of T tokens: sample i reads tokens `[i T, i T + T)` and predicts the
same tokens shifted by one. The *cursor* counts the samples that all ranks together have consumed since the run began;
it is the whole state of the data, and any number of ranks can go on from it. Each epoch visits every sample exactly
once, in an order of its own, but for those at the end of the corpus that a run holds out for evaluation. Everything
here is **local**.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from mpi_ckpt.layout import shard_range
from mpi_ckpt.train.config import ConfigError
from mpi_ckpt.train.corpus import DataIdentity, check_vocabulary, make_corpus, open_corpus

__all__ = ["DataIdentity", "Dataset", "make_corpus", "open_dataset", "permute", "sample_ids"]

ROUNDS = 8
ORDER_STREAM = 0x6F72646572  # "order": keeps these keys apart from the corpus's draws under the same seed
BLOCK = 4096  # samples whose order is worked out together, so that most steps pay for a look-up only


class Dataset:
    """Batches of a corpus: `batch(cursor, ...)` gives a rank its part of the global batch that starts at `cursor`.

    `tokens` [n] are unsigned integers, in memory or mapped; `name` stands for them in errors. The last `held_out`
    samples are for evaluation only (`held_out_batch`): no epoch visits them. Raises ConfigError when no sample of
    `seq_len` tokens and the one to predict is left for training, or a token is outside the vocabulary (checked in each
    batch as it is read).
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, seed: int, *, vocab_size: int, name: str, held_out: int = 0
    ) -> None:
        self.tokens, self.seq_len, self.seed, self.vocab_size, self.name = tokens, seq_len, seed, vocab_size, name
        self.held_out = held_out
        self.samples_per_epoch = (len(tokens) - 1) // seq_len - held_out
        if self.samples_per_epoch < 1:
            needed = (held_out + 1) * seq_len + 1
            beside = f", beside {held_out} held out" if held_out else ""
            raise ConfigError(
                f"{name}: the data are too short for one sample{beside}",
                found=f"{len(tokens)} tokens",
                expected=f"at least {needed}: {held_out + 1} sequence(s) of {seq_len} and the next token",
                action="Give more data, a shorter sequence, or hold fewer samples out.",
            )
        self.identity = DataIdentity.of(tokens, name)
        self._may_exceed_vocab = np.iinfo(tokens.dtype).max >= vocab_size
        self._inputs = self._targets = np.empty((0, seq_len), np.int64)

    def batch(self, cursor: int, global_batch: int, rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """`(inputs, targets)`, both `[b, T]` int64: this rank's `shard_range` of the samples from `cursor` on.

        `cursor` and `global_batch` count samples of all `size` ranks; the next step's cursor is their sum. b differs by
        one between ranks when `global_batch` does not divide, and may be 0. The arrays are reused: the next call
        overwrites them. Raises ConfigError for a token outside the vocabulary.
        """
        start, stop = shard_range(global_batch, size, rank)
        ids = self.sample_ids(cursor + start, stop - start)
        if len(ids) != len(self._inputs):
            self._inputs, self._targets = (np.empty((len(ids), self.seq_len), np.int64) for _ in range(2))
        self._read(ids.tolist(), self._inputs, self._targets)
        return self._inputs, self._targets

    def held_out_batch(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """`(inputs, targets)`, both `[stop - first, T]` int64 and new: held-out samples `first` to `stop`.

        They are counted from 0 to `held_out` in the order of the corpus. Raises ConfigError as `batch` does.
        """
        inputs, targets = (np.empty((stop - first, self.seq_len), np.int64) for _ in range(2))
        self._read(range(self.samples_per_epoch + first, self.samples_per_epoch + stop), inputs, targets)
        return inputs, targets

    def sample_ids(self, cursor: int, count: int) -> np.ndarray:
        """The samples `[count]` int64 that `count` positions from `cursor` on stand for, see `sample_ids` below."""
        return sample_ids(cursor, count, self.samples_per_epoch, self.seed)

    def _read(self, samples: Iterable[int], inputs: np.ndarray, targets: np.ndarray) -> None:
        """Fill the rows of `inputs` and `targets` with samples of the corpus."""
        for row, sample in enumerate(samples):
            position = sample * self.seq_len
            window = self.tokens[position : position + self.seq_len + 1]
            if self._may_exceed_vocab:
                check_vocabulary(window, self.vocab_size, self.name, position)
            inputs[row] = window[:-1]
            targets[row] = window[1:]


def open_dataset(
    path: str | None, seq_len: int, seed: int, *, vocab_size: int, total_tokens: int, held_out: int = 0
) -> Dataset:
    """The data set of file `path` (see `open_corpus`), or of `make_corpus(seed, total_tokens)` when `path` is None.

    Its last `held_out` samples are for evaluation only. Raises ConfigError, which names the file, when the data cannot
    be used.
    """
    if path is None:
        tokens, name = make_corpus(seed, total_tokens, vocab_size), f"synthetic text, seed {seed}"
    else:
        tokens, name = open_corpus(path, vocab_size), path
    return Dataset(tokens, seq_len, seed, vocab_size=vocab_size, name=name, held_out=held_out)


def sample_ids(cursor: int, count: int, samples_per_epoch: int, seed: int) -> np.ndarray:
    """The samples `[count]` int64, each in `[0, samples_per_epoch)`, that positions `cursor` onwards stand for.

    Position p is place `p % samples_per_epoch` of epoch `p // samples_per_epoch`; a stretch may cross epochs.
    """
    ids = np.empty(count, np.int64)
    done = 0
    while done < count:
        epoch, place = divmod(cursor + done, samples_per_epoch)
        block, offset = divmod(place, BLOCK)
        part = _order(block, samples_per_epoch, seed, epoch)[offset : offset + count - done]
        ids[done : done + len(part)] = part
        done += len(part)
    return ids


@lru_cache(maxsize=4)
def _order(block: int, n: int, seed: int, epoch: int) -> np.ndarray:
    """The samples at places `block * BLOCK` onwards of an epoch, at most BLOCK of them: kept, so not to be changed."""
    return permute(np.arange(block * BLOCK, min(n, (block + 1) * BLOCK)), n, seed, epoch)


def permute(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of `range(n)`, keyed by (seed, epoch), sends `places` `[k]` int64.

    Needs O(k) memory and time, however large `n` is. A generalised Feistel cipher on `range(a) x range(b)`, where `a b`
    exceeds n by sqrt(n) at most, and cycle walking: what falls on n or beyond is sent on until it comes back inside
    (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, after Luby and Rackoff, 1988). Each round
    adds to one half, modulo its range, a value that depends on the other half: it can be undone whatever that value
    is, so the whole is one-to-one.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = np.random.PCG64([ORDER_STREAM, seed, epoch]).random_raw(ROUNDS)  # promised stable, see make_corpus
    found = _encrypt(places, a, b, keys)
    while (outside := found >= n).any():
        found[outside] = _encrypt(found[outside], a, b, keys)
    return found


def _encrypt(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the cipher: `x` [k] in `range(a b)`, taken as the pair (x mod a, x div a), to another such pair."""
    high, low = np.divmod(x.astype(np.uint64), np.uint64(a))
    for first, second in zip(keys[0::2], keys[1::2], strict=True):
        low = (low + _mix(high + first) % np.uint64(a)) % np.uint64(a)
        high = (high + _mix(low + second) % np.uint64(b)) % np.uint64(b)
    return (high * np.uint64(a) + low).astype(np.int64)


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, modulo 2^64 (Steele, Lea and Flood, OOPSLA 2014): every bit depends on all."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
