"""What is found out about a directory before anything is put there."""

import errno
import os
import warnings
from pathlib import Path

import pytest

from tierstep.errors import ConfigError
from tierstep.io.directories import BufferedFallbackWarning, FallbackNotices, filesystem_type, probe_directory

MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 259:1 / /mnt/fast\\040drive rw - xfs /dev/nvme0n1 rw
25 22 259:2 / /mnt rw - ext3 /dev/sdb rw
26 22 259:3 / /mnt rw master:3 - btrfs /dev/sdc rw
"""


def test_a_probe_tells_what_the_directory_can_do_and_leaves_nothing_behind(tmp_path):
    probe = probe_directory(tmp_path)
    assert probe.path == tmp_path
    assert probe.free_bytes > 0
    assert (probe.reason is None) == probe.direct
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["open", "pwritev", "preadv"])
def test_o_direct_refused_at_any_stage_is_a_reason_and_leaves_nothing_behind(tmp_path, monkeypatch, name):
    def refuse(*arguments):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, name, refuse)
    probe = probe_directory(tmp_path)
    assert (probe.direct, probe.reason) == (False, "O_DIRECT fails with Invalid argument")
    assert list(tmp_path.iterdir()) == []


def test_o_direct_that_reads_other_bytes_than_were_written_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda descriptor, parts, offset: parts[0].nbytes)
    assert probe_directory(tmp_path).reason == "O_DIRECT transfers give other bytes than were written"


def test_a_missing_directory_is_refused_with_a_remedy_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match=r"missing does not exist: create it, or pass another one"):
        probe_directory(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a directory"):
        probe_directory(tmp_path / "file")


def test_a_directory_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable .this user may not write there"):
        probe_directory(tmp_path)


def test_a_read_only_file_system_is_refused():
    with pytest.raises(ConfigError, match="not writable .its file system is mounted read-only"):
        probe_directory(read_only_directory())


def read_only_directory() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path = Path(line.split()[4])
        if path.is_dir() and os.statvfs(path).f_flag & os.ST_RDONLY:
            return path
    pytest.skip("nothing is mounted read-only on this machine")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/mnt/fast drive/run", "xfs"),
        ("/mnt/fast", "btrfs"),
        ("/mnt", "btrfs"),
        ("/mnt2", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_and_latest_mount(path, expected):
    assert filesystem_type(Path(path), MOUNTS) == expected


def test_a_fallback_is_announced_once_a_directory():
    notices = FallbackNotices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for directory in (Path("/a"), Path("/b"), Path("/a")):
            notices.give(directory, "no O_DIRECT")
    assert [warning.category for warning in caught] == [BufferedFallbackWarning] * 2
    assert notices.given(Path("/a"))
    assert not notices.given(Path("/c"))
