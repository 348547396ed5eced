"""The README tells the truth: its code runs, its tree exists, its numbers are those of bench/results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tierstep.bench.readme import BEGIN, END, numbers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_first_code_block_runs_as_it_is(tmp_path):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "'nvme': 1" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_tree_names_every_folder():
    tree = README.split("## What is where")[1]
    named = set(re.findall(r"^    (\w+)/ ", tree, re.MULTILINE))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {line.split("/")[0] for line in tracked.splitlines() if "/" in line}
    assert named == {folder for folder in folders if not folder.startswith(".")}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w./]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_the_numbers_are_those_of_the_results():
    assert README.split(BEGIN)[1].split(END)[0] == numbers(ROOT / "bench/results")


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^    make (\w+)", README, re.MULTILINE))))
def test_make_knows_the_commands(command):
    assert f"\n{command}:" in (ROOT / "Makefile").read_text()
