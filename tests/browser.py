"""A headless Chromium for tests, driven through its DevTools pipe: no other package is needed.

Protocol: https://chromedevtools.github.io/devtools-protocol/ ; over a pipe, messages are JSON and end with a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
]
_PATIENCE = 240.0  # seconds of silence while an answer is awaited


class Browser:
    """One page of one browser; `complaints` are its console's errors and warnings, `requests` what it asked for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._loaded = False
        self._sent, self._rest = 0, b""
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]

        def as_three_and_four() -> None:  # where the browser looks for them
            high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))
            os.dup2(high_in, 3)
            os.dup2(high_out, 4)

        self._process = subprocess.Popen(
            command, pass_fds=(3, 4), preexec_fn=as_three_and_four, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the page; its result."""
        return self._call(method, self._session, **parameters)

    def open(self, path: Path) -> None:
        """Load a file, to the end of its scripts."""
        self._loaded = False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """Show the page so wide, in this colour scheme, `light` or `dark`; returns when it is laid out."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => done(1)), 400))")

    def run(self, script: str) -> Any:
        """The JSON value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """End the browser."""
        try:
            self._call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        number = self._sent
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while number not in self._answers:
            self._receive()
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _receive(self) -> None:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE)
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "id" in message:
            self._answers[message["id"]] = message
        else:
            self._noticed(message["method"], message["params"])

    def _noticed(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(about["entry"]))
