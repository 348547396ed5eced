"""Text as bytes, one token each, and batches that are a pure function of the step."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from tierstep.configs.schema import Data
from tierstep.errors import ConfigError

STDLIB = Path("stdlib")
STDLIB_SUFFIXES = {".py", ".txt", ".rst"}
STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test"}  # not on every machine alike
PROBE_BYTES = 8192


class TextData:
    """The bytes of a text, cut into sequences at places that depend on seed, step and micro-step alone.

    So the position in the data is the step's number, and a resumed run sees what an uninterrupted one would.
    """

    def __init__(self, text: bytes, *, sequence_length: int, batch_size: int, seed: int) -> None:
        self.text_bytes = len(text)
        self.digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._seed = seed

    def batch(self, step: int, micro_step: int = 0) -> torch.Tensor:
        """Return the token ids of a micro-batch: int64, [batch_size, sequence_length], on the CPU."""
        places = self.text_bytes - self._sequence_length + 1
        starts = [_draw(places, self._seed, step, micro_step, row) for row in range(self._batch_size)]
        return torch.stack([self._tokens[s : s + self._sequence_length] for s in starts]).to(torch.int64)


def open_data(config: Data, seed: int) -> TextData:
    """Read the text that `config` names, up to `max_bytes`. Blocks on files.

    Raises `ConfigError`: the text is missing, unreadable, binary, or shorter than one sequence.
    """
    text = read_text(config.path, config.max_bytes)
    if len(text) < config.sequence_length:
        raise ConfigError(
            f"[data] path = '{config.path}' has {len(text)} bytes of text, less than one sequence of "
            f"{config.sequence_length}: take more text, raise max_bytes, or lower sequence_length"
        )
    return TextData(text, sequence_length=config.sequence_length, batch_size=config.batch_size, seed=seed)


def read_text(path: Path, max_bytes: int) -> bytes:
    """Return up to `max_bytes` bytes of text files: those of a folder before those of its subfolders, by name."""
    files = _stdlib_files() if path == STDLIB else _files(path)
    text = bytearray()
    try:
        for file in files:
            if len(text) >= max_bytes:
                break
            text += _read_if_text(file, max_bytes - len(text))
    except OSError as error:
        raise ConfigError(f"[data] {error.filename or path} cannot be read: {error.strerror}") from None
    if not text:
        raise ConfigError(f"[data] path = '{path}' holds no text (empty or binary files only): name another")
    return bytes(text)


def _stdlib_files() -> Iterator[Path]:
    files = _walk(Path(sysconfig.get_path("stdlib")), STDLIB_LEFT_OUT)
    return (file for file in files if file.suffix in STDLIB_SUFFIXES)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        return iter([path])
    if path.is_dir():
        return _walk(path)
    raise ConfigError(f"[data] path = '{path}' does not exist: name a text file, a folder, or \"stdlib\"")


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """Yield the regular files under `root`, by name, a folder's own before those of its subfolders; none hidden."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = sorted(name for name in subfolders if name not in left_out and not name.startswith("."))
        files = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (file for file in files if file.is_file())


def _raise(error: OSError) -> None:
    raise error


def _read_if_text(file: Path, max_bytes: int) -> bytes:
    """Return the start of `file`; nothing if it is binary, which a zero byte tells."""
    with file.open("rb") as stream:
        start = stream.read(min(PROBE_BYTES, max_bytes))
        return b"" if b"\0" in start else start + stream.read(max_bytes - len(start))


def _draw(choices: int, *key: int) -> int:
    """Return a number below `choices` that depends on `key` alone, on every machine and version alike."""
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % choices
