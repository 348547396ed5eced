import json
import sys

import pytest

from tierstep import cli

from trainer.tiny_training import command, write_config


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tierstep", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    found = command("train", write_config(folder), "--quiet", "--steps", 3)
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.splitlines()) == 1
    return folder / "run"


def assert_refused(found, *words):
    code, _, stderr = found
    assert code == 2
    assert stderr.startswith("error: ")
    assert len(stderr.splitlines()) == 1
    for word in words:
        assert word in stderr


def test_train_shows_tables_and_ends_with_a_line_of_json(run, tmp_path):
    code, stdout, stderr = run("train", write_config(tmp_path), "--steps", 4)
    assert (code, stderr) == (0, "")
    values = json.loads(stdout.splitlines()[-1])
    assert values["steps"] == 4
    assert values["last_loss"] == float.fromhex(values["last_loss_hex"])
    assert values["checkpoint"] == str(tmp_path / "run/checkpoints/step-00000004")
    for words in ("step 4/4: loss", "tokens/s", "nvme", "busy s", "TB a day", values["checkpoint"]):
        assert words in stdout
    assert "\x1b" not in stdout


def test_train_takes_its_options_over_the_file(run, tmp_path):
    text = tmp_path / "other.txt"
    text.write_text("abc" * 100)
    options = ["--data", text, "--out", tmp_path / "there", "--set", "optimizer.lr=0", "--steps", 1, "--quiet"]
    code, stdout, _ = run("train", write_config(tmp_path), *options)
    assert code == 0
    assert json.loads(stdout)["checkpoint"] == str(tmp_path / "there/checkpoints/step-00000001")


@pytest.mark.parametrize(("asked", "drawn"), [([], [4]), (["--trace-step", 2, "--trace-step", 3], [2, 3])])
def test_train_draws_the_timeline_of_the_last_step_or_of_those_asked_for(run, tmp_path, asked, drawn):
    config, folder = write_config(tmp_path), tmp_path / "timelines/of this run"
    assert run("train", config, "--steps", 4, "--quiet", "--trace", folder, *asked)[0] == 0
    names = [f"step-{step:08d}.{kind}" for step in drawn for kind in ("json", "png")]
    assert sorted(path.name for path in folder.iterdir()) == names
    events = json.loads((folder / names[0]).read_text())["traceEvents"]
    passes = [event["name"] for event in events if event.get("cat") in ("forward", "backward")]
    assert sorted(passes) == ["micro-batch 0", "micro-batch 0", "micro-batch 1", "micro-batch 1"]
    assert {"read", "write"} <= {event.get("cat") for event in events}


def test_a_place_where_no_timeline_can_be_kept_is_refused_before_the_run(run, tmp_path):
    (tmp_path / "file").touch()
    found = run("train", write_config(tmp_path), "--trace", tmp_path / "file")
    assert_refused(found, "--trace", "cannot be made", "another folder")
    assert not (tmp_path / "run").exists()


def test_a_model_option_replaces_the_sizes_of_the_file(run, tmp_path):
    from transformers import LlamaConfig

    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes).save_pretrained(tmp_path / "hf")
    code, stdout, _ = run("plan", write_config(tmp_path), "--model", tmp_path / "hf", "--json", "--no-measure")
    assert code == 0
    assert json.loads(stdout)["parameters"] == 2 * 256 * 16 + 4 * 16 * 16 + 3 * 16 * 16 + 3 * 16


def test_plan_says_what_train_then_does(run, tmp_path):
    config = write_config(tmp_path)
    code, stdout, _ = run("plan", config, "--json", "--no-measure")
    planned = json.loads(stdout)
    assert code == 0
    assert not (tmp_path / "run").exists()
    trained = json.loads(run("train", config, "--quiet")[1])
    assert planned["tier_bytes"] == trained["tier_bytes"]
    assert planned["parameters"] == trained["parameters"]
    # what the last step left in slots at the start of the first is nothing, hence at most
    assert trained["bytes_written_per_step"] <= planned["bytes_written_per_step"] + planned["slots"]["bytes"]


def test_plan_shows_tables_and_measures(run, tmp_path):
    code, stdout, _ = run("plan", write_config(tmp_path))
    assert code == 0
    for words in ("activations", "peak of the process", "pinned", "slot files", "optimizer step, at least", "TB a day"):
        assert words in stdout


def test_plan_refuses_with_numbers(run, tmp_path):
    found = run("plan", write_config(tmp_path), "--no-measure", "--set", "tiers.ram=1KiB")
    assert_refused(found, "ram budget of 1024 bytes", "raise ram")


def test_doctor_says_what_is_here_and_why_not_the_rest(run, tmp_path):
    code, stdout, _ = run("doctor", tmp_path)
    assert code == 0
    for words in (
        "torch",
        "native kernel",
        "I/O backend threads",
        "I/O backend uring",
        "I/O backend libaio",
        "memory",
        "O_DIRECT",
    ):
        assert words in stdout
    found = json.loads(run("doctor", tmp_path, "--json")[1])
    assert found["directories"][0]["path"] == str(tmp_path)


def test_doctor_names_a_directory_that_cannot_be_used(run, tmp_path):
    assert_refused(run("doctor", tmp_path / "nope"), "nope does not exist")


def test_ckpt_ls_lists(run, trained):
    assert "step-00000003" in run("ckpt", "ls", trained / "checkpoints")[1]
    listed = json.loads(run("ckpt", "ls", trained / "checkpoints", "--json")[1])
    assert [info["step"] for info in listed] == [3]


@pytest.mark.parametrize("place", ["", "step-00000003"])
def test_ckpt_verify_reads_one_or_all(run, trained, place):
    code, stdout, _ = run("ckpt", "verify", trained / "checkpoints" / place)
    assert code == 0
    assert "step 3" in stdout
    assert "sound" in stdout


def test_ckpt_verify_finds_a_flipped_bit_and_names_the_file(run, tmp_path):
    assert run("train", write_config(tmp_path), "--quiet")[0] == 0
    file = tmp_path / "run/checkpoints/step-00000006/records/000001.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 4
    file.write_bytes(content)
    found = run("ckpt", "verify", tmp_path / "run/checkpoints")
    assert_refused(found, str(file))
    assert "step-00000008: step 8" in found[1]


def test_ckpt_prune_says_what_it_would_delete_and_then_deletes_it(run, tmp_path):
    assert run("train", write_config(tmp_path), "--quiet")[0] == 0
    folder = tmp_path / "run/checkpoints"
    rule = ["--keep", 1, "--keep-every", 6]
    assert run("ckpt", "prune", folder, *rule, "--dry-run")[:2] == (0, f"would delete {folder / 'step-00000003'}\n")
    assert run("ckpt", "prune", folder, *rule)[:2] == (0, f"deleted {folder / 'step-00000003'}\n")
    assert run("ckpt", "prune", folder, *rule)[:2] == (0, f"nothing to delete in {folder}\n")
    assert [info["step"] for info in json.loads(run("ckpt", "ls", folder, "--json")[1])] == [6, 8]
    assert_refused(run("ckpt", "prune", folder, "--keep", 0), "keep=0")


def test_ckpt_export_writes_the_newest_or_the_one_that_is_named(run, trained, tmp_path):
    for number, place in enumerate((trained / "checkpoints", trained / "checkpoints/step-00000003")):
        target = tmp_path / f"{number}.pt"
        code, stdout, _ = run("ckpt", "export", place, "--to", "torch", target)
        assert (code, stdout) == (
            0, f"{target}: {target.stat().st_size} bytes from {trained / 'checkpoints/step-00000003'}\n"
        )  # fmt: skip
    assert_refused(run("ckpt", "export", trained / "checkpoints", "--to", "torch", target), "exists already")
    assert_refused(run("ckpt", "export", trained / "checkpoints", "--to", "zip", tmp_path / "x"), "zip")


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_a_place_without_checkpoints_is_refused(run, tmp_path, verb):
    assert_refused(run("ckpt", verb, tmp_path / "nope"), "nope")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], ["does not exist", "quickstart"]),
        (["tiny.toml", "--set", "run.step=3"], ["unknown key", "steps"]),
        (["tiny.toml", "--set", "model.hidden_size=64", "--model", "."], ["brings its own hidden_size"]),
        (["tiny.toml", "--set", "tiers.nvme=['nowhere']"], ["nowhere does not exist"]),
        (["tiny.toml", "--resume", "--fresh"], ["--resume", "--fresh"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch, arguments, words):
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_refused(run("train", *arguments), *words)


def test_an_error_has_no_traceback_in_a_process_of_its_own_either():
    found = command("train", "nonsense")
    assert_refused((found.returncode, found.stdout, found.stderr), "nonsense")


def test_version(run):
    assert run("--version") == (0, "tierstep 0.1.0\n", "")


def test_a_signal_gives_the_shells_exit_code(run, tmp_path, monkeypatch):
    import os
    import signal

    from tierstep.progress import ProgressLines

    first_only = lambda _, event: event.step == 1 and os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(ProgressLines, "on_step", first_only)
    code, stdout, _ = run("train", write_config(tmp_path))
    assert code == 128 + signal.SIGTERM
    assert json.loads(stdout.splitlines()[-1])["stopped_by"] == signal.SIGTERM


def test_calibrate_measures_and_doctor_says_what_is_taken(run, tmp_path, monkeypatch):
    from tierstep.io import calibration
    from tierstep.io.engines import Engine

    other = Engine("threads", 3, 1, 2 << 20)
    monkeypatch.setattr(calibration, "candidates", lambda: [Engine(), other])
    monkeypatch.setattr(calibration, "decide", lambda _: other)
    monkeypatch.setattr(calibration, "FILES", 1)
    code, stdout, stderr = run("calibrate", "--nvme", tmp_path, "--seconds", 0.1)
    assert (code, stderr) == (0, "")
    assert "takes threads, 3 x 2 MiB" in stdout
    assert f"I/O backend auto in {tmp_path}"[:20] in run("doctor", tmp_path)[1]
    described = {b["name"]: b["reason"] for b in json.loads(run("doctor", tmp_path, "--json")[1])["backends"]}
    assert "takes threads, 3 x 2 MiB; measured best" in described[f"auto in {tmp_path}"]
    found = json.loads(run("calibrate", "--nvme", tmp_path, "--seconds", 0.1, "--json")[1])
    assert found["engine"]["threads"] == 3
    assert {len(sample["rates"]) for sample in found["samples"]} == {4}
    assert list(tmp_path.iterdir()) == []


def test_calibrate_refuses_directories_that_are_missing_or_named_twice(run, tmp_path):
    assert_refused(run("calibrate", "--nvme", tmp_path / "nope"), "nope does not exist")
    assert_refused(run("calibrate", "--nvme", tmp_path, tmp_path / "."), "twice")
