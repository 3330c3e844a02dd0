"""The screen of a terminal after a training has ended or was interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.scripts import run_python_in_terminal
from tools.terminal import Screen

SCRIPT = """
import os, signal, time
import torch, trainstack as ts

class Slow(ts.SupervisedModule):
    def train_step(self, global_step, batch, device):
        time.sleep(0.15)  # so that each step is painted: a bar is painted at most ten times a second
        if global_step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.15)
        return super().train_step(global_step, batch, device)

args = ts.TrainerArguments(epochs=3, train_batch_size=8, output_dir="run", backend="sp", device="cpu", report=False)
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
ts.Trainer(Slow(torch.nn.Linear(4, 1), torch.nn.MSELoss(), "sgd", data, data), args).train()
"""


@pytest.mark.processes
def test_no_bar_is_left_after_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SCRIPT, encoding="utf-8")
    screen = Screen(40)
    status = run_python_in_terminal("slow.py", folder=tmp_path, screen=screen)
    text = "\n".join(screen.lines)
    assert status == -signal.SIGINT, text
    table = screen.lines.index("epoch train/loss    val/loss      time")
    row, *after = screen.lines[table + 1 :]
    assert row.startswith("  1/3")
    assert " ".join("".join(f"{one:<40}" for one in after).split()) == (
        "Ctrl-C: the run stops at the end of this step. Ctrl-C again stops it at once. stopped by Ctrl-C after global "
        "step 5. Saved run/checkpoints/checkpoint-000000005; to resume, run it again with resume='auto', or "
        "--resume auto."
    )
