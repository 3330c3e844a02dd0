"""A pickle with a command never runs in any function that takes a checkpoint or weights."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.checkpointing.support import make_checkpoint
from tests.helpers.modules import Classifier, arguments, train
from trainstack.cli.main import main


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trace}'",)


def plain(bomb: Bomb, path: Path) -> None:
    path.write_bytes(pickle.dumps(bomb))


def zipped(bomb: Bomb, path: Path) -> None:
    torch.save({"state_dict": bomb, "weight": torch.ones(2)}, path)


FORMS = [plain, zipped]
NAMES = ["weights.pt", "last.ckpt", "model.safetensors", "weights", "MANIFEST.json"]


def takers(file: Path) -> dict[str, Callable[[], object]]:
    """Everything that takes a path of a checkpoint or of weights."""
    where = file.parent

    def resume(**changes: Any) -> Callable[[], object]:
        return lambda: train(Classifier(), where / "run", **changes)

    loading = {"checkpoint": False, "load_dir": str(where), "load_filename": file.name}
    return {
        "resume": resume(resume=str(file)),
        "resume a folder": resume(resume=str(where)),
        "load_dir": resume(checkpointer_args=ts.DefaultCheckpointerArguments(checkpoint=False, load_dir=str(where))),
        "load_filename": resume(checkpointer_args=ts.DefaultCheckpointerArguments(**loading)),
        "init_weights_from": resume(init_weights_from=file),
        "init_weights_from a folder": resume(init_weights_from=where),
        "warm_start": lambda: ts.warm_start(Classifier(), file),
        "read_checkpoint": lambda: ts.read_checkpoint(file),
        "read_model": lambda: ts.read_model(where),
        "verify_checkpoint": lambda: ts.verify_checkpoint(file),
        "load_torch_weights": lambda: ts.load_torch_weights(file),
        "ls": lambda: main(["checkpoints", "ls", str(where)]),
        "verify": lambda: main(["checkpoints", "verify", str(file), str(where)]),
        "show": lambda: main(["checkpoints", "show", str(file)]),
        "diff": lambda: main(["checkpoints", "diff", str(file), str(where)]),
    }


@pytest.fixture
def bomb(tmp_path: Path) -> Bomb:
    return Bomb(tmp_path / "exploded")


def test_the_bomb_is_live(bomb: Bomb, tmp_path: Path) -> None:
    plain(bomb, tmp_path / "bomb")
    pickle.loads((tmp_path / "bomb").read_bytes())

    assert bomb.trace.exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("write", FORMS)
def test_a_pickle_in_a_file_never_runs(
    write: Callable[[Bomb, Path], None], name: str, bomb: Bomb, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / name
    write(bomb, file)
    for taker, take in takers(file).items():
        try:
            code = take()
        except ts.TrainstackError:
            code = 2
        assert code == 2 or taker == "ls", taker
        assert not bomb.trace.exists(), taker


@pytest.mark.parametrize("file", ["MANIFEST.json", "state.json", "model.safetensors", "state.safetensors"])
@pytest.mark.parametrize("write", FORMS)
def test_a_pickle_in_place_of_a_checkpoint_file_never_runs(
    write: Callable[[Bomb, Path], None], file: str, bomb: Bomb, tmp_path: Path
) -> None:
    checkpoint = ts.write_checkpoint(make_checkpoint(1), tmp_path / "in", "checkpoint-000000001")
    write(bomb, checkpoint / file)
    for taker, take in takers(checkpoint).items():
        try:
            code = take()
        except ts.TrainstackError:
            code = 2
        assert code in (1, 2) or taker == "ls" or taker == "show", taker
        assert not bomb.trace.exists(), taker


@pytest.mark.parametrize("name", ["optimizer.pt", ".metadata", "rng_state.pth", "README.md"])
def test_a_pickle_among_the_files_of_a_checkpoint_never_runs(name: str, bomb: Bomb, tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    train(Classifier(), tmp_path / "in", checkpointer_args=saving)
    checkpoint = tmp_path / "in" / "checkpoints" / "checkpoint-000000006"
    plain(bomb, checkpoint / name)
    for take in takers(checkpoint).values():
        try:
            take()
        except ts.TrainstackError:
            continue
        finally:
            assert not bomb.trace.exists()
    trainer = ts.Trainer(Classifier(), arguments(tmp_path / "run", resume=str(checkpoint)))
    assert trainer.plan is not None
    assert trainer.global_steps_finished == 6
