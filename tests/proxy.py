"""A proxy before an HTTP server that makes the faults of networks: delays, resets, 503s, truncation, lost answers."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def answer(status: str, code: str) -> bytes:
    """An error as S3 puts it."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>in words</Message></Error>'
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@dataclass
class Request:
    """One request as it passed: `sent` are the bytes of its body that came in, `fault` is what was done to it."""

    method: str
    path: str  # decoded, with the query
    sent: int
    received: int = 0  # bytes of the answer
    fault: str | None = None

    def puts(self, part: str) -> bool:
        """Whether it puts bytes of an object whose key has `part` in it."""
        return self.method == "PUT" and part in self.path


# What is done to a request: None, "503", "reset" (both ways, before the body is through), "truncate" (the server gets
# half of the body), "lost" (the server does it, and its answer is dropped), "cut" (half of the answer), seconds, or
# bytes: an answer in place of the server's.
Decide = Callable[[Request], "str | bytes | float | None"]


class Proxy:
    """Set `decide` at any time. `requests` is everything that came in."""

    def __init__(self, server: str) -> None:
        self._server = urlsplit(server)
        self.decide: Decide = lambda request: None
        self.requests: list[Request] = []
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def sent(self, part: str) -> int:
        """Bytes of objects with `part` in their keys that came in, whatever became of them."""
        return sum(request.sent for request in self.requests if request.puts(part))

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._handle(client)

    def _handle(self, client: socket.socket) -> None:
        head, body = _read_head(client)
        if not head:
            return
        line, _, headers = head.partition(b"\r\n")
        method, path, _ = line.decode().split(" ", 2)
        length = int(match[1]) if (match := re.search(rb"(?i)content-length: *(\d+)", headers)) else 0
        request = Request(method, unquote(path), 0)
        self.requests.append(request)
        fault = self.decide(request)
        request.fault = None if fault is None else str(fault)
        if isinstance(fault, float | int):
            time.sleep(fault)
        upto = length // 2 if fault in ("reset", "truncate") else length
        while len(body) < upto and (more := client.recv(1 << 18)):
            body += more
            request.sent = len(body)
        if fault == "reset":
            return _reset(client)
        if fault == "503" or isinstance(fault, bytes):
            client.sendall(BUSY if fault == "503" else fault)
            return None
        head = re.sub(rb"(?im)^connection:.*\r\n", b"", head) + b"Connection: close\r\n\r\n"
        with socket.create_connection((self._server.hostname, self._server.port)) as server:
            server.sendall(head + body[:upto])
            if fault == "truncate":
                server.shutdown(socket.SHUT_WR)
            answer = b""
            while more := server.recv(1 << 18):
                request.received += len(more)
                if fault is None or isinstance(fault, float | int):
                    client.sendall(more)
                else:
                    answer += more
        if fault == "cut":
            client.sendall(answer[: answer.index(b"\r\n\r\n") + 4 + (len(answer) - answer.index(b"\r\n\r\n")) // 2])
        if fault in ("cut", "lost", "truncate"):
            _reset(client)
        return None


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(1 << 16)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head + b"\r\n", body


def _reset(client: socket.socket) -> None:
    """Close with a RST: what is on its way is lost."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
