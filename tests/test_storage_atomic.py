"""The one door to durable change: whole or not at all, in the right order, every error with its path."""

from __future__ import annotations

import errno
import os
import re

import pytest

from mpi_ckpt.storage import atomic
from tests.storage_cases import mounted, needs_strace, operations, under_strace


@needs_strace
def test_a_file_is_synced_before_its_name_and_its_name_before_success(tmp_path):
    _, calls = under_strace(tmp_path, "atomic.write_file(here / 'a', b'x' * 100)")
    expected = ["fsync a.tmp", "close a.tmp", "rename a.tmp a", "fsync .", "close ."]
    assert operations(calls, tmp_path) == expected


@needs_strace
def test_each_new_directory_is_synced_into_its_parent_from_the_top_down(tmp_path):
    _, calls = under_strace(tmp_path, "atomic.make_dir(here / 'a' / 'b')")
    made = [call for call in operations(calls, tmp_path) if not call.startswith("close")]
    assert made == ["mkdir a/b", "mkdir a", "fsync .", "mkdir a/b", "fsync a"]


@needs_strace
def test_files_go_in_the_order_given_with_one_sync_of_the_directory_after_them(tmp_path):
    code = "[(here / n).touch() for n in 'abc']\natomic.remove(here / 'c', here / 'a', here / 'b')"
    _, calls = under_strace(tmp_path, code)
    done = [call for call in operations(calls, tmp_path) if not call.startswith("close")]
    assert done == ["unlink c", "unlink a", "unlink b", "fsync ."]


@needs_strace
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("fsync:error=EIO:when=1", "new.tmp"),
        ("fsync:error=EIO:when=2", "directory"),
        ("write:error=ENOSPC", "new.tmp"),
        ("rename:error=EACCES", "new.tmp"),
        ("close:error=EIO:when=1", "new.tmp"),
    ],
)
def test_each_failure_of_a_durable_write_is_an_oserror_with_errno_and_path(tmp_path, fault, named):
    directory = tmp_path / "directory"
    directory.mkdir()
    code = """
import sys
try:
    atomic.write_file(here / 'directory' / 'new', b'bytes')
except OSError as error:
    sys.exit(f'{error.errno} {Path(error.filename).name}')
"""
    said, _ = under_strace(tmp_path, code, "-P", str(directory), "-P", f"{directory}/new.tmp", f"--inject={fault}")
    assert said.split() == [str(getattr(errno, re.search(r"E[A-Z]+", fault)[0])), named]
    if "when=2" not in fault:
        assert not (directory / "new").exists()


@needs_strace
def test_a_short_write_is_continued(tmp_path):
    code = "atomic.write_file(here / 'a', bytes(range(256)) * 40)"
    # The injected call writes nothing and reports 1000 bytes: what matters is that the rest follows from there.
    under_strace(tmp_path, code, "-P", str(tmp_path / "a.tmp"), "--inject=write:retval=1000:when=1")
    assert (tmp_path / "a").stat().st_size == 256 * 40 - 1000


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "manifest.json"
    atomic.write_file(path, b"old and longer")
    atomic.write_file(path, "neu: ä")
    assert path.read_text(encoding="utf-8") == "neu: ä"
    assert os.listdir(tmp_path) == ["manifest.json"]


def test_a_failed_replacement_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    atomic.write_file(path, b"old")
    (tmp_path / "a.tmp").mkdir()  # in the way
    with pytest.raises(IsADirectoryError):
        atomic.write_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_temporary_name_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "a.tmp").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"a\.tmp"):
        atomic.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_fsync_errors_name_the_path(tmp_path):
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011  the errno is checked below
            atomic.fsync_file(writer, tmp_path / "file")
    finally:
        os.close(reader)
        os.close(writer)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(tmp_path / "file"))


def test_a_missing_directory_cannot_be_synced(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        atomic.fsync_dir(tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none")


def test_directories_are_made_with_their_parents_and_may_exist(tmp_path):
    atomic.make_dir(tmp_path / "a" / "b" / "c")
    atomic.make_dir(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_file_in_the_place_of_a_directory_is_an_error(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        atomic.make_dir(tmp_path / "a")
    with pytest.raises(NotADirectoryError):
        atomic.make_dir(tmp_path / "a" / "b")


def test_removing_what_is_not_there_is_an_error_unless_said(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(FileNotFoundError):
        atomic.remove(tmp_path / "none")
    atomic.remove(tmp_path / "none", tmp_path / "a", missing_ok=True)
    assert os.listdir(tmp_path) == []


def test_a_directory_with_a_foreign_file_stays(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "foreign").touch()
    with pytest.raises(OSError, match="not empty"):
        atomic.remove_dir(tmp_path / "a")
    atomic.remove(tmp_path / "a" / "foreign")
    atomic.remove_dir(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_leaves_no_final_file(tmp_path):
    with mounted(tmp_path, "tmpfs", "size=64k"):
        atomic.write_file(tmp_path / "small", b"x" * 4096)
        with pytest.raises(OSError, match="No space left") as caught:
            atomic.write_file(tmp_path / "large", b"x" * 200_000)
        assert caught.value.errno == errno.ENOSPC
        assert not (tmp_path / "large").exists()
        assert (tmp_path / "small").read_bytes() == b"x" * 4096


def test_files_and_directories_obey_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        atomic.make_dir(tmp_path / "d")
        atomic.write_file(tmp_path / "d" / "f", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o640
