"""Scratch directories: own, removed with their owner, and nobody else's business."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tierstep.errors import ConfigError
from tierstep.io import scratch as module
from tierstep.io.scratch import LOCK_NAME, PREFIX, open_scratch, remove_abandoned


def abandon(directory, name="dead"):
    """Leave what a killed process leaves."""
    path = directory / f"{PREFIX}{name}"
    (path / "folder").mkdir(parents=True)
    (path / "folder" / "record.slot").write_bytes(b"bytes")
    (path / LOCK_NAME).touch()
    return path


def test_a_scratch_directory_is_there_until_it_is_closed(tmp_path):
    with open_scratch(tmp_path) as scratch:
        assert scratch.path.parent == tmp_path
        assert scratch.path.name.startswith(PREFIX)
        (scratch.path / "record.slot").write_bytes(b"bytes")
    scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_directory_that_somebody_removed_can_be_closed(tmp_path):
    scratch = open_scratch(tmp_path)
    module._remove(scratch.path)
    scratch.close()


def test_several_optimizers_share_a_directory(tmp_path):
    scratches = [open_scratch(tmp_path) for _ in range(5)]
    assert len({scratch.path for scratch in scratches}) == 5
    assert all((scratch.path / LOCK_NAME).exists() for scratch in scratches)
    for scratch in scratches:
        scratch.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one_and_not_before(tmp_path):
    code = f"""
        import sys
        from tierstep.io.scratch import open_scratch

        scratch = open_scratch({str(tmp_path)!r})
        (scratch.path / "record.slot").write_bytes(bytes(100))
        print(scratch.path, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        path = owner.stdout.readline().strip()
        assert remove_abandoned(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert os.path.exists(path)
    with open_scratch(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch.path]


def test_foreign_files_and_directories_are_never_touched(tmp_path):
    outside = tmp_path / "outside"
    victim = abandon(outside, "victim")
    shared = tmp_path / "shared"
    (shared / "data").mkdir(parents=True)
    (shared / "data" / LOCK_NAME).touch()
    (shared / f"{PREFIX}file").write_bytes(b"a file")
    (shared / f"{PREFIX}without-lock").mkdir()
    (shared / f"{PREFIX}without-lock" / "kept").touch()
    (shared / f"{PREFIX}link").symlink_to(victim)
    (shared / f"{PREFIX}linked-lock").mkdir()
    (shared / f"{PREFIX}linked-lock" / LOCK_NAME).symlink_to(victim / LOCK_NAME)
    before = sorted(shared.rglob("*"))
    assert remove_abandoned(shared) == []
    assert sorted(shared.rglob("*")) == before
    assert (victim / "folder" / "record.slot").exists()


def test_links_inside_an_abandoned_directory_are_removed_and_not_followed(tmp_path):
    path, precious = abandon(tmp_path), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (path / "link").symlink_to(precious)
    assert remove_abandoned(tmp_path) == [path]
    assert (precious / "file").exists()


def test_the_empty_directory_of_a_starter_that_was_killed_before_its_lock_file_is_removed(tmp_path):
    (tmp_path / f"{PREFIX}dead").mkdir()
    assert remove_abandoned(tmp_path) == [tmp_path / f"{PREFIX}dead"]
    assert list(tmp_path.iterdir()) == []


def test_a_cleaner_that_comes_before_the_lock_file_makes_the_starter_begin_anew(tmp_path, monkeypatch):
    real, removed = Path.mkdir, []

    def mkdir(path, *arguments, **options):
        real(path, *arguments, **options)
        if not removed:
            removed.extend(remove_abandoned(tmp_path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with open_scratch(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch.path]
        assert removed != [scratch.path]
        assert len(removed) == 1


def test_a_cleaner_that_takes_the_lock_first_makes_the_starter_begin_anew(tmp_path, monkeypatch):
    """The race that `_try_make` tells: cleaner B comes between A's lock file and A's lock."""
    real, calls = fcntl.flock, []

    def flock(descriptor, operation):
        calls.append(descriptor)
        if len(calls) == 1:
            assert len(remove_abandoned(tmp_path)) == 1
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with open_scratch(tmp_path) as scratch:
        assert list(tmp_path.iterdir()) == [scratch.path]
        assert (scratch.path / LOCK_NAME).exists()


def test_a_starter_that_finds_its_lock_taken_begins_anew(tmp_path, monkeypatch):
    real, answers = module._lock, [False]
    monkeypatch.setattr(module, "_lock", lambda lock: answers.pop() if answers else real(lock))
    with open_scratch(tmp_path) as scratch:
        assert module._lock(scratch._lock)


def test_many_starters_at_once_get_a_directory_each(tmp_path):
    for number in range(10):
        abandon(tmp_path, f"dead-{number}")
    start, scratches = threading.Barrier(8), []

    def work():
        start.wait()
        scratches.append(open_scratch(tmp_path))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tmp_path.iterdir()) == sorted(scratch.path for scratch in scratches)
    for scratch in scratches:
        scratch.close()


def test_a_directory_that_cannot_be_cleaned_is_in_nobodys_way(tmp_path, monkeypatch):
    path, real = abandon(tmp_path), module._remove

    def remove(target):
        if target == path:
            raise PermissionError(errno.EACCES, "no")
        real(target)

    monkeypatch.setattr(module, "_remove", remove)
    with open_scratch(tmp_path) as scratch:
        assert sorted(tmp_path.iterdir()) == sorted([path, scratch.path])


def test_a_file_system_without_locks_is_refused_and_nothing_is_left_behind(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match="cannot hold slot files: No locks available"):
        open_scratch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="create it"):
        open_scratch(tmp_path / "missing")


def test_a_forked_child_neither_removes_nor_unlocks_what_its_parent_owns(tmp_path):
    scratch = open_scratch(tmp_path)
    child = os.fork()
    if not child:
        scratch.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert remove_abandoned(tmp_path) == []
    assert scratch.path.exists()
    scratch.close()


def test_descriptors_stay_flat(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        abandon(tmp_path)
        open_scratch(tmp_path).close()
    assert len(os.listdir("/proc/self/fd")) == before
