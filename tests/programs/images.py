"""Images of a directory while ranks change it: what would be left if everything ended now.

After a SIGKILL all changes are there, in the order in which they were made. After a power cut only that is certain
which was fsynced: a file has the bytes of its last fsync (or none), a directory the names of its last.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.programs.faults import Operation


class Camera:
    """For `watched`: images go to `<root>.images`, named `<number>-<rank>-<call>-<file>`, then `.power` for power cuts.

    All ranks' changes happen one at a time for it.
    """

    def __init__(self, root: Path, rank: int) -> None:
        self._root, self._rank = root, rank
        self._images = root.with_name(root.name + ".images")
        self._images.mkdir(exist_ok=True)
        self._lock = os.open(self._images / ".lock", os.O_RDWR | os.O_CREAT)
        self._thread_lock = threading.Lock()
        self._disk = Disk(root, self._images / ".disk")

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        if operation.call in ("close", "ftruncate") or operation.path == "writer.lock":
            yield
            return
        with self._thread_lock, self._alone():
            self._disk.load()
            yield
            name = f"{len(os.listdir(self._images)):03d}-{self._rank}-{operation.call}-{Path(operation.path).name}"
            if operation.call == "fsync":
                self._disk.fsync(self._root / operation.path)
                self._disk.develop(self._images / (name + ".power"))
            else:
                self._disk.change(operation.call, self._root / operation.path)
                shutil.copytree(self._root, self._images / name)
            self._disk.store()

    def end(self) -> None:
        """One rank, when all is done: what a power cut now would leave."""
        self._disk.load()
        self._disk.develop(self._images / "end.power")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Disk:
    """What is durable below `root`, told by the fsyncs seen; kept in the directory `memory` for all ranks.

    An inode is known by its number and a count of its reuses: "77.2". `names` maps a directory's to {name: inode}.
    """

    def __init__(self, root: Path, memory: Path) -> None:
        self._root, self._memory = root, memory
        self._reuses: dict[str, int] = {}
        self._names: dict[str, dict[str, Any]] = {}

    def load(self) -> None:
        if self._memory.exists():
            self._reuses, self._names = json.loads((self._memory / "names.json").read_text())
            return
        self._memory.mkdir()  # the first rank to come: all that is there already is durable
        for directory, _, files in os.walk(self._root):
            for file in files:
                self.fsync(Path(directory, file))
            self.fsync(Path(directory))
        self.store()

    def store(self) -> None:
        (self._memory / "names.json").write_text(json.dumps([self._reuses, self._names]))

    def change(self, call: str, path: Path) -> None:
        """A file or directory was made: its inode is a new one."""
        if call in ("open", "mkdir"):
            number = str(path.stat().st_ino)
            self._reuses[number] = self._reuses.get(number, 0) + 1

    def fsync(self, path: Path) -> None:
        if path.is_dir():
            self._names[self._inode(path)] = {
                entry.name: [self._inode(Path(entry.path)), entry.is_dir()] for entry in os.scandir(path)
            }
        else:
            shutil.copyfile(path, self._memory / self._inode(path))

    def develop(self, image: Path) -> None:
        """Make `image` what is durable."""
        self._develop(self._inode(self._root), image)

    def _develop(self, directory: str, image: Path) -> None:
        image.mkdir()
        for name, (inode, is_directory) in self._names.get(directory, {}).items():
            if is_directory:
                self._develop(inode, image / name)
            elif (self._memory / inode).exists():
                shutil.copyfile(self._memory / inode, image / name)
            else:
                (image / name).touch()  # a name without bytes

    def _inode(self, path: Path) -> str:
        number = str(path.stat().st_ino)
        return f"{number}.{self._reuses.get(number, 0)}"
