"""Checkpoints of format version 1: their weights load, and a resume is refused.

`checkpoints/SPEC` has a run directory after 4 of 12 global steps, which an earlier version wrote.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import trainstack as ts
from tests.helpers import old_checkpoints
from trainstack.checkpointing.reading import read_states
from trainstack.errors import CheckpointMismatchError

SPECS = sorted(path.name for path in old_checkpoints.FOLDER.iterdir())


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("resume", [True, "auto", "path"])
def test_a_resume_of_an_old_checkpoint_is_refused(spec: str, resume: bool | str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(old_checkpoints.FOLDER / spec, folder)
    saving = ts.DefaultCheckpointerArguments(save_dir=str(folder / "checkpoints"))
    wanted = folder / "checkpoints" / "checkpoint-000000004" if resume == "path" else resume

    with pytest.raises(CheckpointMismatchError, match=r"format version 1 .*init_weights_from="):
        ts.DefaultCheckpointer(saving).load(wanted)


@pytest.mark.parametrize("spec", SPECS)
def test_weights_of_an_old_checkpoint_load(spec: str) -> None:
    path = old_checkpoints.FOLDER / spec / "checkpoints" / "checkpoint-000000004"
    ts.checkpointing.verify_checkpoint(path)
    state = ts.read_model(path)
    for mapped in (False, True):
        found = ts.read_model(path, mapped=mapped)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    module = torch.nn.Module()
    for name, tensor in state.items():
        module.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))
    report = ts.warm_start(module, {name.replace(".", "_"): tensor for name, tensor in state.items()}, strict=True)
    assert report.is_complete
    assert read_states(path)[1]["rank_states"] is None


def test_a_run_starts_from_old_weights(tmp_path: Path) -> None:
    source = old_checkpoints.FOLDER / "sp" / "checkpoints" / "checkpoint-000000004"

    trainer = old_checkpoints.run("sp", tmp_path / "run", init_weights_from=str(source))

    assert trainer.global_steps_finished == 12


def test_a_flipped_bit_in_an_old_file_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(old_checkpoints.FOLDER / "sp" / "checkpoints" / "checkpoint-000000004", path)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-9] ^= 4
    (path / "model.safetensors").write_bytes(data)
    for mapped in (False, True):
        with pytest.raises(ts.errors.CheckpointDamagedError, match=r"model\.safetensors"):
            ts.read_model(path, mapped=mapped)
