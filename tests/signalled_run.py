"""Run in a process of its own: a user's loop with `on_signal`. Usage: signalled_run.py FOLDER; prints each step."""

import signal
import sys
import time
from pathlib import Path

import tierstep
from tierstep import Tiers

from training_runs import OPTIONS, make_parameters, train

if __name__ == "__main__":
    parameters = make_parameters()
    checkpoints = tierstep.Checkpoints(Path(sys.argv[1]), on_signal=signal.SIGTERM)
    with tierstep.AdamW(parameters.items(), **OPTIONS, tiers=Tiers(gpu=0, ram=1 << 20)) as optimizer:
        for step in range(1, 10_000):
            train(optimizer, parameters, step - 1, step)
            print(step, flush=True)
            time.sleep(0.01)  # a step takes some time
            if checkpoints.save_requested():
                checkpoints.save(step, optimizer=optimizer, wait=True)
                sys.exit(128 + signal.SIGTERM)
