import io

from rich.console import Console

from tierstep.progress import ProgressBar
from tierstep.train import train

from trainer.tiny_training import tiny_config


def test_the_bar_fits_into_80_columns_and_gives_the_cursor_back(tmp_path):
    screen = io.StringIO()
    with ProgressBar(Console(file=screen, force_terminal=True, width=80)) as observer:
        train(tiny_config(tmp_path), observer=observer)
    shown = screen.getvalue()
    assert "8/8" in shown
    for words in ("loss", "tok/s", "fwd+bwd", "files"):
        assert words in shown.rsplit("8/8", 1)[1]
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert shown.rstrip().endswith("\x1b[?25h")
