"""Record README's script in a terminal with a kill and a restart, and draw the picture at the top of README.

python -m tools.recording                writes docs/images/terminal.svg
python -m tools.recording picture.svg    another file
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tools.pages import ROOT, blocks_of
from tools.terminal import Screen, run_in_terminal

PICTURE = ROOT / "docs" / "images" / "terminal.svg"
WIDTH = 100
COMMAND = "python train.py"
LAST_LINE = "    val_batch_size=500,\n"
KILLED_AT = 160
KILLED = f"""
import os, runpy, signal, sys
from trainstack import SupervisedModule

def kill(module, global_step):
    if global_step == {KILLED_AT}:
        os.kill(os.getpid(), signal.SIGKILL)

SupervisedModule.on_end_train_step = kill
sys.argv = ["train.py"]
runpy.run_path("train.py", run_name="__main__")
"""
"""Runs the script up to a global step within an epoch. On a busy machine, a kill by another process comes too late."""


def script() -> str:
    """README's first block with `resume="auto"`."""
    source = blocks_of(ROOT / "README.md")[0].source
    if source.count(LAST_LINE) != 1:
        sys.exit(f"README's first block does not have the line {LAST_LINE.strip()!r} once: change tools/recording.py.")
    return source.replace(LAST_LINE, LAST_LINE + '    resume="auto",\n')


def record() -> Screen:
    """The screen of the terminal after a kill and a restart of the script."""
    screen = Screen(WIDTH)
    with tempfile.TemporaryDirectory(prefix="recording-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(script(), encoding="utf-8")
        screen.feed(f"$ {COMMAND}\r\n")
        run(["-c", KILLED], folder, screen, -signal.SIGKILL)
        screen.feed(f"\r\nKilled\r\n$ {COMMAND}\r\n")
        run(["train.py"], folder, screen, 0)
    return screen


def run(arguments: list[str], folder: Path, screen: Screen, expected: int) -> None:
    """Run Python in a terminal, and exit unless it ends with the `expected` status."""
    status = run_in_terminal([sys.executable, *arguments], folder, screen)
    if status != expected:
        sys.exit(f"the run ended with {status} instead of {expected}:\n" + "\n".join(screen.lines))


def draw(screen: Screen) -> str:
    """`screen` as SVG. It loads no files: without the `@font-face` of rich, a browser uses its monospace font."""
    console = Console(record=True, width=screen.width, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.ansi()))
    svg = console.export_svg(title=COMMAND, unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw the recording at the top of README.")
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE, help="default: docs/images/terminal.svg")
    picture: Path = parser.parse_args().picture
    picture.write_text(draw(record()), encoding="utf-8")
    print(picture)


if __name__ == "__main__":
    main()
