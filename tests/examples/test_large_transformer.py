"""The example of a sharded transformer trains on two processes and exports a model of transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.processes import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "large_transformer.py"


@pytest.mark.processes
@pytest.mark.distributed
@pytest.mark.long
def test_it_trains_shards_and_writes_a_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*launch, str(SCRIPT), "--max-steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60.0),
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^memory .*: parameters 337 KiB, gradients 337 KiB,", done.stdout, re.M)  # of 674
    assert "runs/large_transformer/fine-tuned has a LlamaForCausalLM of 172,608 parameters" in done.stdout
