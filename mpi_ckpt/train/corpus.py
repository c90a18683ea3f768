"""Where tokens come from: a synthetic corpus or a file, and the identity that a checkpoint stores of either.

A corpus is one flat array of unsigned tokens. A file's corpus is a map of the file: opening it costs two reads of at
most 1 MiB, whatever its size. Everything here is **local**.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from mpi_ckpt.train.config import ConfigError

MIB = 1 << 20
MAX_VOCAB = 1 << 16  # tokens are uint16 at most


def make_corpus(seed: int, total_tokens: int, vocab_size: int = 64) -> np.ndarray:
    """Synthetic text `[total_tokens]` uint16, tokens in `[0, vocab_size)`: the same bytes everywhere, for ever.

    A lexicon of 32 words, each of 2 to 5 letters and a closing blank (token 0); every word is followed by one of its 4
    successors, evenly (a Markov chain over words, as in Shannon, "A Mathematical Theory of Communication", 1948,
    section 3). Letters and successors lean towards small numbers, so there is something to learn at every range:
    the frequencies of letters, then spelling, then which word follows which. At most ln 4 nats a word are left then.

    `make_corpus(s, n)[:k]` equals `make_corpus(s, k)`. Only raw integers of PCG64 are used, because NumPy promises that
    a fixed seed will always produce the same ones; it makes no such promise for the methods of a Generator (NEP 19).
    Raises ConfigError for a `vocab_size` outside 2 to 65536, a negative `total_tokens` or a negative `seed`.
    """
    _check_range("vocab_size", vocab_size, 2, MAX_VOCAB)
    _check_range("total_tokens", total_tokens, 0, None)
    _check_range("seed", seed, 0, None)
    n_words, n_successors, shortest, longest = 32, 4, 2, 5
    bits = np.random.PCG64(seed)

    def draw(shape: int | tuple[int, ...], bound: int) -> np.ndarray:
        return (bits.random_raw(int(np.prod(shape))) % np.uint64(bound)).astype(np.int64).reshape(shape)

    # The fixed-size draws come first: the words that follow are then a stream, which longer texts only continue.
    n_letters = shortest + draw(n_words, longest - shortest + 1)
    letters = 1 + np.minimum(*draw((2, n_words, longest), vocab_size - 1))  # [word, place]
    successors = np.minimum(*draw((2, n_words, n_successors), n_words)).tolist()

    place = np.arange(longest + 1)
    lexicon = np.zeros((n_words, longest + 1), "<u2")  # [word, place], one more place for the blank
    lexicon[:, :longest] = np.where(place[:longest] < n_letters[:, None], letters, 0)
    used = place <= n_letters[:, None]

    word, walk = 0, []
    for choice in draw(total_tokens // (shortest + 1) + 1, n_successors).tolist():
        word = successors[word][choice]
        walk.append(word)
    return lexicon[walk][used[walk]][:total_tokens].copy()


def open_corpus(path: str, vocab_size: int) -> np.ndarray:
    """The tokens of a file, mapped and read-only: `[size]` uint8, or `[size / 2]` uint16 for a name that ends in .bin.

    A .bin file holds little-endian uint16 tokens with no header, as nanoGPT's prepare.py writes them; any other file is
    text, a byte a token, and needs a vocabulary of 256. Only head and tail are read here; later tokens are checked as
    they are used. Raises ConfigError, which names the file, for one that cannot be read, is empty, holds half a token,
    or a token outside the vocabulary.
    """
    dtype = np.dtype("<u2" if path.endswith(".bin") else "u1")
    try:
        nbytes = os.stat(path).st_size
        if nbytes == 0 or nbytes % dtype.itemsize:
            raise ConfigError(
                "the data do not hold a whole number of tokens",
                path=path,
                found=f"{nbytes} bytes",
                expected=f"a positive multiple of {dtype.itemsize} bytes ({dtype.name} tokens)",
                action="Check that the file was written completely; text must not have a name that ends in .bin.",
            )
        tokens = np.asarray(np.memmap(path, dtype, mode="r"))  # a plain array slices faster than the memmap class
    except OSError as error:
        raise ConfigError(
            "the data cannot be read",
            path=path,
            found=error.strerror or error,
            expected="a regular file that this rank may read",
            action="Check the path: every rank opens the file by this same name.",
        ) from error
    if dtype.itemsize == 1 and vocab_size < 256:
        raise ConfigError(
            "the vocabulary is too small for the bytes of the data",
            path=path,
            found=f"vocab_size {vocab_size}",
            expected="256 for text, which is read a byte a token",
            action="Set the vocabulary to 256, or tokenize the text to uint16 into a file that ends in .bin.",
        )
    for first, part in _head_and_tail(tokens):
        check_vocabulary(part, vocab_size, path, first)
    return tokens


def check_vocabulary(tokens: np.ndarray, vocab_size: int, name: str, position: int) -> None:
    """Raise ConfigError if one of `tokens` [n], found at `position` of corpus `name`, is outside the vocabulary."""
    if np.maximum.reduce(tokens) < vocab_size:
        return
    worst = int(np.argmax(tokens >= vocab_size))
    raise ConfigError(
        "a token of the data is outside the vocabulary",
        path=name,
        found=f"token {int(tokens[worst])} at position {position + worst}",
        expected=f"tokens below vocab_size {vocab_size}",
        action="Set the vocabulary to that of the tokenizer which wrote the file.",
    )


@dataclass(frozen=True)
class DataIdentity:
    """What a checkpoint stores of its data, as plain JSON values, so that other data are not taken for the same.

    `name` is the file's path or says that the text is synthetic, `dtype` how a token is stored, `nbytes` the size, and
    `sha256` the digest of the first MiB and the last MiB (which overlap, or are one, in a small corpus).
    """

    name: str
    dtype: str
    nbytes: int
    sha256: str

    @classmethod
    def of(cls, tokens: np.ndarray, name: str) -> DataIdentity:
        """The identity of a corpus `tokens` [n]. Reads 2 MiB at most."""
        digest = hashlib.sha256()
        for _, part in _head_and_tail(tokens):
            digest.update(part.data)
        return cls(name, tokens.dtype.str, tokens.nbytes, digest.hexdigest())

    def check_unchanged(self, stored: DataIdentity) -> None:
        """Raise ConfigError unless this corpus has the size and digest that `stored` had.

        The name may differ: a file may move between two launches.
        """
        if (self.dtype, self.nbytes, self.sha256) == (stored.dtype, stored.nbytes, stored.sha256):
            return
        raise ConfigError(
            f"{self.name}: the data are not those that the run was started with",
            found=self._content(),
            expected=f"{stored._content()} ({stored.name})",
            action="Give the original data, or start a new run in another directory.",
        )

    def _content(self) -> str:
        return f"{self.nbytes} bytes of {self.dtype} tokens, sha256 of head and tail {self.sha256}"


def _head_and_tail(tokens: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """`(position, tokens)` of the first and the last MiB of `tokens` [n], as views."""
    n = min(len(tokens), MIB // tokens.itemsize)
    return [(0, tokens[:n]), (len(tokens) - n, tokens[len(tokens) - n :])]


def _check_range(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        raise ConfigError(
            f"{name} cannot be used",
            found=value,
            expected=f"{low} to {high}" if high is not None else f"at least {low}",
        )
