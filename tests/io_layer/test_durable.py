"""Writing so that a crash leaves the old bytes or the new ones."""

import errno
import os
from pathlib import Path

import pytest

from tierstep.errors import DiskFull, TransferError
from tierstep.io.durable import fsync_directory, fsync_file, make_directories, write_durably

REAL = {name: getattr(os, name) for name in ("write", "fsync", "rename", "replace")}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "manifest").write_bytes(b"old")
    return tmp_path / "manifest"


def refuse(code):
    def call(*arguments):
        raise OSError(code, os.strerror(code))

    return call


def test_the_new_bytes_replace_the_old_ones_and_no_draft_is_left(path):
    write_durably(path, b"new bytes")
    assert path.read_bytes() == b"new bytes"
    assert list(path.parent.iterdir()) == [path]


def test_a_new_file_may_be_empty(tmp_path):
    write_durably(tmp_path / "empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_the_data_is_synced_before_the_rename_and_the_folder_after_it(path, monkeypatch):
    steps = []

    def fsync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        steps.append("sync folder" if name == path.parent.name else "sync data")
        REAL["fsync"](descriptor)

    def replace(self, target):
        steps.append("rename")
        REAL["replace"](self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    write_durably(path, b"new")
    assert steps == ["sync data", "rename", "sync folder"]


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_full_drive_leaves_the_old_bytes_and_no_draft(path, monkeypatch, name):
    monkeypatch.setattr(os, name, refuse(errno.ENOSPC))
    with pytest.raises(DiskFull, match=r"writing 3 bytes to .*manifest failed: No space left .* bytes are free"):
        write_durably(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_short_and_interrupted_writes_go_on(path, monkeypatch):
    calls = []

    def write(descriptor, data):
        calls.append(len(data))
        if len(calls) % 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return REAL["write"](descriptor, data[:2])

    monkeypatch.setattr(os, "write", write)
    write_durably(path, b"seven b")
    assert path.read_bytes() == b"seven b"


def test_a_write_that_moves_nothing_is_an_error(path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(TransferError, match="EIO"):
        write_durably(path, b"new")


def test_syncing_what_is_missing_names_it(tmp_path):
    with pytest.raises(TransferError, match="fsync of .*missing failed"):
        fsync_file(tmp_path / "missing")
    with pytest.raises(TransferError, match="fsync of directory .*missing failed"):
        fsync_directory(tmp_path / "missing")


def test_a_failed_sync_is_reported(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    for sync, target in ((fsync_file, path), (fsync_directory, path.parent)):
        with pytest.raises(TransferError, match="EIO"):
            sync(target)


def test_a_file_system_that_cannot_sync_directories_is_accepted(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    fsync_directory(path.parent)


def test_every_directory_that_is_made_is_synced_into_the_one_above_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
    make_directories(tmp_path / "a" / "b" / "c")
    assert sorted(synced) == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_directories(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


def test_a_directory_that_cannot_be_made_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TransferError, match=r"making directory .*file/folder failed: Not a directory"):
        make_directories(tmp_path / "file" / "folder")
