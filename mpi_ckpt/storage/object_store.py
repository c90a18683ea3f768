"""The one small interface to a store of objects: a key, its bytes, put whole or not at all.

    s3://bucket/prefix   any S3, by the client `obstore` (extra `s3`), with the standard environment of S3 clients
    file:///directory    a directory, with every byte and name made durable

No object is ever half there: what is read under a key is what one `put` put there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import numpy as np

from mpi_ckpt.errors import RemoteFailed, RemoteRefused

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ObjectStore(Protocol):
    """Keys are relative to `url`, with '/' between their parts. Everything raises RemoteFailed, and is **Local.**

    Methods may be called by several threads. What may pass by itself, an answer 503 or a dropped connection, was tried
    again, with growing pauses, before it is raised; RemoteRefused is what only the user can change.
    """

    url: str

    def check(self, *, writing: bool = False) -> None:
        """Raise RemoteRefused where credentials, bucket or address are wrong; with `writing` also where nothing can be
        put there. Leaves nothing; `writing` makes the directory that is the store, if it is one."""

    def put_stream(self, key: str, pieces: Iterable[np.ndarray], nbytes: int) -> None:
        """An object of about `nbytes`, sent in parts and in constant memory.

        A piece (uint8) need stay as it is only until the next is taken. What taking one raises comes out as it is, and
        no object is there.
        """

    def put(self, key: str, data: bytes, replaces: str | None = None) -> bool:
        """A small object: a new one, or in the place of the version `replaces`.

        False, and nothing is changed, where the key holds another object than that. When an answer is lost that may be
        the very object that was put: read it back.
        """

    def get(self, key: str) -> tuple[bytes, str] | None:
        """A small object and its version; None where there is none."""

    def read(self, key: str, offset: int, nbytes: int) -> bytes | None:
        """Bytes of an object, fewer only at its end; None where there is none."""

    def size(self, key: str) -> int | None:
        """Bytes of an object; None where there is none."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Size of every object whose key begins with the directory `prefix`."""

    def delete(self, keys: Sequence[str]) -> None:
        """Make the objects go, in any order; it is fine if they are gone."""


@functools.lru_cache(maxsize=16)
def open_store(url: str) -> ObjectStore:
    """**Local.** The store at `url`; nothing is asked of it yet. Raises RemoteRefused for a URL that names none."""
    scheme, host, path = check_url(url)
    if scheme == "s3":
        from mpi_ckpt.storage.object_s3 import S3Objects  # only here: it needs a package that few have

        return S3Objects(host, path.strip("/"))
    from mpi_ckpt.storage.object_directory import DirectoryObjects

    return DirectoryObjects(Path(unquote(path)))


def check_url(url: str) -> tuple[str, str, str]:
    """**Local.** The parts of a URL that names a store: scheme, host, path. Raises RemoteRefused for any other."""
    try:
        scheme, host, path, query, fragment = urlsplit(url if isinstance(url, str) else "")
    except ValueError:  # half an IPv6 address
        raise _bad_url(url) from None
    text = unquote(path) if scheme == "file" else path
    parts = text.strip("/").split("/")
    named = {
        # Not every server keeps a key with an empty part, or with a backslash, as it is.
        "s3": _BUCKET.fullmatch(host) and ("" not in parts or parts == [""]) and "\\" not in path,
        "file": host in ("", "localhost") and path.startswith("/") and parts != [""],
    }
    if not named.get(scheme) or query or fragment or not {".", ".."}.isdisjoint(parts):
        raise _bad_url(url)
    # A blank at an end, or what cannot be seen, is a slip: the store would be one that nobody finds again.
    if url != url.strip() or not (url + text).isprintable():
        raise _bad_url(url)
    return scheme, host, path


def put_in_place(store: ObjectStore, key: str, data: bytes, expected: str) -> None:
    """**Local.** Put a small object in the place of what is there now, and read it back. Raises RemoteFailed.

    Not of what comes between: of two that do so at one moment one is told.
    """
    put_over(store, key, store.get(key), data, expected)


def put_over(store: ObjectStore, key: str, held: tuple[bytes, str] | None, data: bytes, expected: str) -> None:
    """**Local.** `put_in_place` of what `get` gave some time ago, `held`, and of nothing that came since."""
    if held is not None and held[0] == data:
        return
    failure: RemoteFailed | None = None
    try:
        store.put(key, data, None if held is None else held[1])
    except RemoteRefused:
        raise
    except RemoteFailed as error:  # only the answer may have been lost: look
        failure = error
    found = store.get(key)
    if found is None or found[0] != data:
        raise failure or RemoteFailed(
            "an object is not what was put",
            path=f"{store.url}/{key}",
            found="no object" if found is None else "another one",
            expected=expected,
            action="See whether another run uploads to the same URL; give each its own.",
        )


def _bad_url(url: object) -> RemoteRefused:
    shown = url if "@" not in str(url) else f"{str(url).partition('://')[0]}://...@..."  # it may hold a password
    return RemoteRefused(
        "the remote tier's URL is not one",
        found=repr(shown),
        expected="s3://bucket/prefix or file:///directory",
        action="Give credentials and endpoint in the environment: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...",
    )
