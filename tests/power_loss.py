"""A drive that loses power: what it may hold at any instant, given what was fsynced until then.

`Recorder` watches a directory while code changes it. It notes the whole directory before every change (a *moment*), and
what each fsync made durable (a *sync*): the bytes of one file, or the names of one directory. `states_after_power_loss`
replays that. At every moment the drive may hold, of each file and directory, what its last fsync left or anything it
had since, as POSIX promises no order among the rest. A file that was never synced is empty, a directory too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tierstep

Names = dict[str, int]  # of one directory: the number of the file or directory behind each name
Changed = dict[str, int | None]  # names of one directory that are something else, or gone
Tree = tuple  # of (name, bytes of a file or Tree of a directory), sorted; equal trees are equal contents

CHANGES = ["open", "write", "pwritev", "posix_fallocate", "ftruncate", "mkdir", "rmdir", "link", "unlink", "remove",
           "rename", "replace"]  # fmt: skip
PACKAGE = str(Path(tierstep.__file__).parent.parent)
TOP = 0  # the number of the watched directory itself


@dataclass
class Image:
    """Files and directories by number, whatever they are called."""

    files: dict[int, bytes] = field(default_factory=dict)
    directories: dict[int, Names] = field(default_factory=dict)

    def update(self, other: Image) -> None:
        """Replace what `other` knows; keep the rest as it was last."""
        self.files.update(other.files)
        self.directories.update(other.directories)


@dataclass(frozen=True)
class Moment:
    """What the directory held before a change. `label` is what the test had to say about that time."""

    image: Image
    label: Any


@dataclass(frozen=True)
class Sync:
    """What an fsync made durable: `content` of one file or directory. `site` is where in the code it was called."""

    site: tuple[str, ...]
    number: int
    content: bytes | Names


class Recorder:
    """Notes moments and syncs of `root` in the `with` block, in which no fsync reaches the real drive.

    What is there at the start counts as durable. Set `label` to mark the moments that follow.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Moment | Sync] = []
        self.label: Any = None
        self._lock = threading.RLock()
        self._numbers: dict[int, int] = {}  # by inode
        self._kept: list[int] = []  # descriptors: the inode of an open file is not used for another one
        self._real: dict[str, Callable[..., Any]] = {}
        self.durable = self._look()

    def __enter__(self) -> Recorder:
        for name in CHANGES:
            self._real[name] = getattr(os, name)
            setattr(os, name, partial(self._change, self._real[name]))
        self._real["fsync"] = os.fsync
        os.fsync = self._fsync
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)
        self.events.append(Moment(self._look(), self.label))
        for descriptor in self._kept:
            os.close(descriptor)

    def _change(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            if function is not self._real["open"] or arguments[1] & os.O_CREAT:
                self.events.append(Moment(self._look(), self.label))
            return function(*arguments, **options)

    def _fsync(self, descriptor: int) -> None:
        with self._lock:
            image, number = self._look(), self._numbers.get(os.fstat(descriptor).st_ino)
            self.events.append(Moment(image, self.label))
            if number is not None:
                content = image.files[number] if number in image.files else image.directories[number]
                self.events.append(Sync(_site(), number, content))

    def _look(self) -> Image:
        image = Image()
        self._look_into(self.root, image)
        return image

    def _look_into(self, folder: Path, image: Image) -> None:
        number = self._number(folder)
        names = image.directories[number] = {}
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                names[entry.name] = self._number(Path(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    self._look_into(Path(entry.path), image)
                else:
                    image.files[names[entry.name]] = Path(entry.path).read_bytes()

    def _number(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._numbers:
            self._numbers[inode] = len(self._numbers)
            self._kept.append(self._real.get("open", os.open)(path, os.O_RDONLY))
        return self._numbers[inode]


def _site() -> tuple[str, ...]:
    """Return the package's lines on the stack that led to an fsync."""
    frame, lines = sys._getframe(), []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            lines.append(f"{Path(file).name}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


def states_after_power_loss(recorder: Recorder, without: tuple[str, ...] | None = None) -> Iterator[tuple[Any, Tree]]:
    """Yield (label, tree) of what the drive may hold when the power goes at each moment.

    `without` is a site whose fsyncs did not happen.
    """
    durable, now = Image(), Image()
    durable.update(recorder.durable)
    now.update(recorder.durable)
    unsynced: dict[int, list[Names]] = {}
    for event in recorder.events:
        if isinstance(event, Moment):
            for number, names in event.image.directories.items():
                durable.directories.setdefault(number, {})
                unsynced.setdefault(number, []).extend(_changes(now.directories.get(number, {}), names))
            now.update(event.image)
            for image in _possible_images(durable, now, unsynced):
                yield event.label, _tree(image, TOP)
        elif event.site != without:
            (durable.files if isinstance(event.content, bytes) else durable.directories)[event.number] = event.content
            unsynced.pop(event.number, None)


def _changes(before: Names, after: Names) -> Iterator[Changed]:
    """Yield what was done between two moments, and what undoes it. What a rename does is one thing."""
    changed: dict[int, list[str]] = {}
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            changed.setdefault(after.get(name, before.get(name, TOP)), []).append(name)
    for group in changed.values():
        yield {name: after.get(name) for name in group}
        yield {name: before.get(name) for name in group}


def _possible_images(durable: Image, now: Image, unsynced: dict[int, list[Changed]]) -> Iterator[Image]:
    """Yield the extremes, and everything that differs from one of them in one change or in one directory."""
    for files, directories in ((durable, durable), (now, now), (durable, now), (now, durable)):
        yield Image(files.files, directories.directories)
    for base, other in ((durable, now), (now, durable)):
        for number, changes in unsynced.items():
            yield Image(base.files, {**base.directories, number: other.directories[number]})
            for change in changes:
                names = {n: i for n, i in (base.directories[number] | change).items() if i is not None}
                yield Image(base.files, {**base.directories, number: names})


def _tree(image: Image, number: int) -> Tree:
    names = image.directories.get(number, {})
    return tuple((name, _content(image, names[name])) for name in sorted(names))


def _content(image: Image, number: int) -> bytes | Tree:
    return _tree(image, number) if number in image.directories else image.files.get(number, b"")


def write_tree(tree: Tree, folder: Path) -> Path:
    """Make `folder` with what a tree holds; return it."""
    folder.mkdir(parents=True)
    for name, content in tree:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tree(content, folder / name)
    return folder
