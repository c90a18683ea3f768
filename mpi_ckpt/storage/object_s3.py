"""An S3 bucket as a store of objects, spoken to by `obstore`: signing, parts and retries are the client's work.

Credentials, region and endpoint come from its standard environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_REGION, AWS_ENDPOINT_URL, ...) and go nowhere else. Each request is signed with the sha256 of its body, so a server
takes no bytes that changed on their way. What is read nobody checks: that is left to the digests of the shards.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mpi_ckpt.errors import RemoteFailed, RemoteRefused

_PART = 5 << 20  # bytes: the least that S3 takes for a part that is not the last
_MOST_PARTS = 10_000
_AT_ONCE = 2  # parts on their way: memory is one part more than this, and what reads the file ahead
_PATIENT = {  # with bytes that would have to be sent again
    "max_retries": 7,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2},
}
_BRISK = {  # where somebody waits to hear whether the store is there at all
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
}
_NO_VERSION = '"00000000000000000000000000000000"'
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_REFUSALS = {  # what an answer's reason has in it: what that means, and what to do
    "NoSuchBucket": ("the bucket does not exist", "Make it, or look at the URL and AWS_ENDPOINT_URL."),
    "InvalidBucketName": ("no bucket has such a name", "Look at the URL."),
    "NotImplemented": ("the object store cannot do this", "Take one that knows conditional and multipart puts."),
    "InvalidAccessKeyId": ("the object store does not know the key", "Look at AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL."),
    "SignatureDoesNotMatch": ("the object store refuses the secret key", "Look at AWS_SECRET_ACCESS_KEY."),
    "AccessDenied": ("the key may not do this", "Let it list, read, write and delete in the bucket, or take another."),
    "ExpiredToken": ("the credentials have run out", "Look at AWS_SESSION_TOKEN."),
    "RequestTimeTooSkewed": ("the object store's clock is another", "Set the clock of this node."),
    "redirect": ("the bucket is in another region", "Look at AWS_REGION."),
    "Missing": ("the object store refuses", "Look at AWS_REGION, AWS_ENDPOINT_URL and the bucket."),
    "403 Forbidden": ("the object store refuses", f"Look at {', '.join(_KEYS)}, AWS_REGION, AWS_ENDPOINT_URL."),
}
# The client misses one of the keys, or asks the cloud whose machine this may be for both.
_NO_KEYS = ("Missing AccessKey", "Missing SecretAccessKey", "/latest/api/token", "/latest/meta-data/")


class S3Objects:
    """See ObjectStore. The version of an object is its ETag."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """**Local.** Raises RemoteRefused where `obstore` is missing or the environment is not complete."""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client = _client()
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        options: dict[str, Any] = {"timeout": "60s"}
        if endpoint.startswith("http://"):  # a server in the same rack, or a test's
            options["allow_http"] = True

        def connect(retries: dict[str, Any]) -> Any:
            store = self._client.store.S3Store
            return store(bucket, prefix=prefix or None, client_options=options, retry_config=retries)

        with self._explained():
            self._store, self._brisk = connect(_PATIENT), connect(_BRISK)

    def check(self, *, writing: bool = False) -> None:
        """See ObjectStore. One page of a listing needs the credentials, the bucket and the endpoint to be right."""
        with self._explained():
            next(iter(self._client.list(self._brisk, chunk_size=1)), None)
        if writing:
            # In the place of a version that never was: it needs the right to put and puts nothing, so that nothing is
            # left where the key may not delete. (From a server that knows no conditions, an empty object.)
            self._put(self._brisk, "probe", b"", _NO_VERSION)

    def put_stream(self, key: str, pieces: Iterable[np.ndarray], nbytes: int) -> None:
        """See ObjectStore."""
        part = max(_PART, -(-nbytes // _MOST_PARTS))
        copies = (bytes(piece) for piece in pieces)  # the client holds on to what it was given
        with self._explained(key):
            self._client.put(self._store, key, copies, use_multipart=True, chunk_size=part, max_concurrency=_AT_ONCE)

    def put(self, key: str, data: bytes, replaces: str | None = None) -> bool:
        """See ObjectStore."""
        return self._put(self._store, key, data, replaces)

    def _put(self, store: Any, key: str, data: bytes, replaces: str | None) -> bool:
        mode = "create" if replaces is None else {"e_tag": replaces}
        errors = self._client.exceptions
        with self._explained(key):
            try:
                self._client.put(store, key, data, mode=mode)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return False
        return True

    def get(self, key: str) -> tuple[bytes, str] | None:
        """See ObjectStore."""
        with self._explained(key):
            try:
                found = self._client.get(self._store, key)
                return bytes(found.bytes()), found.meta["e_tag"]
            except FileNotFoundError:
                return None

    def read(self, key: str, offset: int, nbytes: int) -> bytes | None:
        """See ObjectStore."""
        if not nbytes:
            return None if self.size(key) is None else b""
        with self._explained(key):
            try:
                return bytes(self._client.get_range(self._store, key, start=offset, length=nbytes))
            except FileNotFoundError:
                return None
            except self._client.exceptions.BaseError as error:
                if "416 Range Not Satisfiable" not in str(error):
                    raise
                return b""  # it begins behind the end

    def size(self, key: str) -> int | None:
        """See ObjectStore."""
        with self._explained(key):
            try:
                return int(self._client.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> dict[str, int]:
        """See ObjectStore."""
        with self._explained(prefix):
            pages = self._client.list(self._brisk, prefix or None)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore. When an answer is lost the client does not ask again; here that does no harm."""
        if not keys:
            return
        try:
            self._delete(self._store, keys)
        except RemoteRefused:
            raise
        except RemoteFailed:
            self._delete(self._brisk, keys)

    def _delete(self, store: Any, keys: Sequence[str]) -> None:
        with self._explained(keys[0]):
            self._client.delete(store, [*keys])

    @contextlib.contextmanager
    def _explained(self, key: str = "") -> Iterator[None]:
        """The client's errors as ours: in one line, with what to do, and without a word of the credentials."""
        try:
            yield
        except (self._client.exceptions.BaseError, FileNotFoundError) as error:
            # Not `from error`: its text holds more than may be logged.
            raise _explain(f"{self.url}/{key}" if key else self.url, _in_a_line(str(error))) from None


def _explain(path: str, found: str) -> RemoteFailed:
    absent = [name for name in _KEYS if not os.environ.get(name)]
    if absent and any(sign in found for sign in _NO_KEYS):
        return RemoteRefused(
            "there are no credentials for the object store",
            path=path,
            found=f"no {' and no '.join(absent)} in the environment",
            expected="both keys there, or a role of this machine that has them",
            action="Set them, and AWS_ENDPOINT_URL unless the bucket is Amazon's.",
        )
    reason = _reason(found)
    found = found if len(found) <= 600 else f"{found[:200]} ... {found[-400:]}"
    for word, (what, action) in _REFUSALS.items():
        if word in reason:
            return RemoteRefused(what, path=path, found=found, expected="success", action=action)
    return RemoteFailed(
        "the object store does not do what was asked",
        path=path,
        found=found,
        expected="success",
        action="See whether the endpoint (AWS_ENDPOINT_URL) answers from this node.",
    )


def _reason(found: str) -> str:
    """An error without addresses: the words in them are the user's, and a run may be named after what is missing."""
    for mark in ("status code: ", "(code: "):  # the server's answer comes last
        if mark in found:
            return found.rpartition(mark)[2]
    return re.sub(r"https?://\S+", "", found)


def _client() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise RemoteRefused(
            "a remote tier in S3 needs the package obstore, which is not installed",
            found="no module obstore",
            expected="the package",
            action="pip install obstore",
        ) from None
    return obstore


def _in_a_line(text: str) -> str:
    """The first line of an error, the server's code and message, and none of the secrets in the environment."""
    line = text.partition("\n\nDebug source")[0]
    said = ": ".join(re.findall(r"<(?:Code|Message)>([^<]*)<", line))
    line = " ".join(filter(None, [line.partition("<?xml")[0].strip().rstrip(":"), said and f"({said})"]))
    for name in _SECRETS:
        if secret := os.environ.get(name):
            line = line.replace(secret, f"<{name}>")
    return " ".join(line.split())
