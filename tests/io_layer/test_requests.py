"""The handle of a transfer."""

import logging
from pathlib import Path

import pytest

from tierstep.errors import TransferTimeout
from tierstep.io.requests import Completion, Write


def completion(timeout_s=0.0):
    return Completion(Write(Path("slot-7"), 4096, memoryview(bytearray(10))), timeout_s)


def test_waiting_too_long_names_the_operation_and_leaves_it_under_way():
    late = completion(timeout_s=0.001)
    with pytest.raises(TransferTimeout, match=r"write of 10 bytes at 4096 to slot-7 has not completed within 0.001 s"):
        late.wait()
    assert not late.done()
    late.finish()
    late.wait()


def test_callbacks_are_called_in_order_and_once():
    called = []
    ending = completion()
    for number in range(3):
        ending.add_done_callback(lambda c, number=number: called.append(number))
    ending.finish()
    ending.add_done_callback(lambda c: called.append("late"))
    assert called == [0, 1, 2, "late"]


def test_a_callback_that_raises_is_logged_and_the_others_are_called(caplog):
    called = []
    ending = completion()
    ending.add_done_callback(lambda c: {}["missing"])
    ending.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        ending.finish()
    assert called == [ending]
    assert "write of 10 bytes at 4096 to slot-7" in caplog.text
    assert "KeyError: 'missing'" in caplog.text
