"""Checkpoints that an earlier tree wrote resume under each backend string.

`checkpoints/SPEC` holds a run directory after 4 of 12 global steps, written before the source tree was reorganised, and
the weights at the end of the same run without an interruption. `python -m tests.helpers.old_checkpoints FOLDER` writes
such fixtures.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers import old_checkpoints


@pytest.mark.parametrize("spec", sorted(path.name for path in old_checkpoints.FOLDER.iterdir()))
def test_a_checkpoint_of_an_earlier_tree_resumes(spec: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(old_checkpoints.FOLDER / spec, folder)
    torch.manual_seed(77)

    resumed = old_checkpoints.run(spec, folder, resume=True)

    assert resumed.global_steps_finished == 12
    expected = old_checkpoints.expected(spec)
    for name, tensor in resumed.module.state_dict().items():
        # Another CPU may round matrix products in another way. A wrong random state or order differs by 1e-3 or more.
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=f"{name} under {spec}")


def test_each_string_that_runs_on_a_cpu_has_a_fixture() -> None:
    specs = {spec for spec in ts.legal_specs() if not spec.endswith("amp-apex")}

    assert specs == {path.name for path in old_checkpoints.FOLDER.iterdir()}
