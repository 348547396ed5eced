"""A signal before the machine goes: the step under way is finished, saved, and the process ends."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tierstep
from tierstep import Tiers
from tierstep.engine.signal_flag import SignalFlag

from trainer.tiny_training import write_config
from training_runs import OPTIONS, make_parameters, outcome, run

TESTS = Path(__file__).parent.parent


def start(*line):
    return subprocess.Popen([sys.executable, *map(str, line)], stdout=subprocess.PIPE, text=True, cwd=TESTS)


def read_until(process, found):
    for line in process.stdout:
        if found(line):
            return
    raise AssertionError("the process ended before")


@pytest.mark.parametrize("times", [1, 2])
def test_a_loop_of_ones_own_saves_after_the_step_under_way_and_loses_nothing(tmp_path, times):
    with start("signalled_run.py", tmp_path) as process:
        read_until(process, lambda line: line == "5\n")
        for _ in range(times):  # some launchers send it twice
            process.send_signal(signal.SIGTERM)
        last = [5, *map(int, process.stdout.read().split())][-1]
    assert process.returncode == 128 + signal.SIGTERM
    (info,) = tierstep.Checkpoints(tmp_path).list()
    assert info.step == last < 10_000
    parameters, expected = make_parameters(), run(Tiers(gpu=0, ram=1 << 20), steps=last)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=Tiers(gpu=0, ram=1 << 20)) as optimizer:
        tierstep.Checkpoints(tmp_path).restore(optimizer=optimizer)
        found = outcome(optimizer, parameters)
    state = {key for key in expected if not key.startswith("weight")}
    assert {key: found[key] for key in state} == {key: expected[key] for key in state}


def test_tierstep_train_saves_says_so_and_ends_with_143(tmp_path):
    config = write_config(tmp_path)
    with start("-m", "tierstep.cli", "train", config, "--steps", 10_000, "--set", "run.checkpoint_every_steps=0",
               "--set", "optimizer.decay_steps=20000") as process:  # fmt: skip
        read_until(process, lambda line: line.startswith("step "))
        process.send_signal(signal.SIGTERM)
        lines = process.stdout.read().splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    (info,) = tierstep.Checkpoints(tmp_path / "run/checkpoints").list()
    assert json.loads(lines[-1])["steps"] == info.step < 10_000
    assert f"stopped by signal 15 after step {info.step}; checkpoint: {info.path}" in lines


@pytest.fixture
def former():
    """What SIGTERM does before and after."""
    received = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, old)


def test_the_former_handler_is_back_after_close(tmp_path, former):
    with tierstep.Checkpoints(tmp_path, on_signal=signal.SIGTERM) as checkpoints:
        assert not checkpoints.save_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.save_requested()
    assert former == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert former == [signal.SIGTERM]


def test_a_second_ctrl_c_interrupts():
    with SignalFlag(signal.SIGINT) as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_still_ends_by_the_signal(tmp_path):
    code = (
        "import os, signal, sys, time, tierstep\n"
        "tierstep.Checkpoints(sys.argv[1], on_signal=signal.SIGTERM)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(60); os._exit(0)\n"
        "sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
    )
    found = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert found.returncode == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, 999, "TERM", True, [signal.SIGTERM, signal.SIGSTOP]])
def test_what_cannot_be_caught_is_refused_and_no_handler_stays(tmp_path, former, number):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(tierstep.ConfigError, match="on_signal="):
        tierstep.Checkpoints(tmp_path, on_signal=number)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_is_told_where_to_ask_for_signals(tmp_path):
    caught = []

    def make():
        with pytest.raises(tierstep.ConfigError, match="main thread only") as error:
            tierstep.Checkpoints(tmp_path, on_signal=signal.SIGTERM)
        caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert caught
