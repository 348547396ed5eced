"""C2: training that is killed again and again, at any time, goes on as if nothing had been; `make soak` does more."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "random_kills_run.py"
KILLS, SEED = 36, 20261207


def test_a_run_that_is_killed_at_random_instants_loses_nothing_and_leaves_nothing(tmp_path):
    ended = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "run", str(KILLS), str(SEED)], check=False, capture_output=True, text=True
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"{KILLS} kills, seed {SEED}, ")
    assert "'saving'" in ended.stdout
