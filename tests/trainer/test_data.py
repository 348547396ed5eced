import os

import pytest
import torch

from tierstep.configs.schema import Data
from tierstep.data import TextData, open_data, read_text
from tierstep.errors import ConfigError

TEXT = bytes(range(1, 256)) * 20


def make(seed=0, sequence_length=16, batch_size=3):
    return TextData(TEXT, sequence_length=sequence_length, batch_size=batch_size, seed=seed)


def test_a_batch_is_byte_values():
    batch = make().batch(step=1)
    assert batch.shape == (3, 16)
    assert batch.dtype == torch.int64
    assert all(bytes(row.tolist()) in TEXT for row in batch)


def test_a_batch_depends_on_seed_step_and_micro_step_alone():
    assert torch.equal(make().batch(5, 1), make().batch(5, 1))
    others = [make().batch(5, 0), make().batch(6, 1), make(seed=1).batch(5, 1)]
    assert not any(torch.equal(make().batch(5, 1), other) for other in others)


def test_batches_are_the_same_on_every_machine():
    assert make().batch(7)[:, 0].tolist() == [79, 176, 85]


def test_a_text_of_exactly_one_sequence_is_enough():
    data = TextData(b"abcd", sequence_length=4, batch_size=2, seed=0)
    assert data.batch(1).tolist() == [list(b"abcd")] * 2


def test_the_standard_library_is_there_without_tests_and_installed_packages():
    text = read_text(Data().path, 2**20)
    assert len(text) == 2**20
    assert text == read_text(Data().path, 2**20)


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b.txt": b"second",
        "a.md": b"first",
        "sub/c": b"third",
        "z.png": b"\x89PNG\0",
        ".secret": b"no",
        ".git/config": b"no",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert read_text(tmp_path, 100) == b"firstsecondthird"
    assert read_text(tmp_path, 8) == b"firstsec"


def test_the_digest_tells_texts_apart():
    other = TextData(TEXT[1:], sequence_length=16, batch_size=3, seed=0)
    assert make().digest == make(seed=9).digest != other.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b"ab\0cd" * 100, "holds no text"), (b"short", "5 bytes of text, less than one sequence")],
)
def test_a_useless_file_is_refused(tmp_path, content, message):
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_data(Data(path=path), seed=0)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no text"):
        open_data(Data(path=tmp_path), seed=0)


def test_a_missing_path_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"nope' does not exist: name a text file, a folder, or \"stdlib\""):
        open_data(Data(path=tmp_path / "nope"), seed=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(TEXT)
    path.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        open_data(Data(path=path), seed=0)
