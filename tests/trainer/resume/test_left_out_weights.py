"""Checkpoints with `keep_frozen=False` hold trained parameters alone, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import InMemory, numbers
from trainstack.cli.main import main
from trainstack.errors import CheckpointMismatchError


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


class Teacher(Net):
    """`body` follows `fast` without gradients, like a target network."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.fast = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.body.weight.data.lerp_(self.fast.weight.data, 0.1)
        return super().forward(x) + self.head(self.fast(x))


class Changes(ts.Callback):
    """Trains `body` in the second epoch alone."""

    def on_train_epoch_begin(self, trainer: Any, epoch: int) -> None:
        (trainer.unfreeze if epoch == 1 else trainer.freeze)(trainer.module.model.body.parameters())


def train(
    folder: Path,
    epochs: int,
    make: Callable[[], nn.Module] = Net,
    callbacks: tuple[Callable[[], ts.Callback], ...] = (),
    **more: Any,
) -> ts.Trainer:
    module = ts.SupervisedModule(make(), nn.functional.cross_entropy, "adamw", numbers(16))
    more.setdefault("checkpointer_args", ts.DefaultCheckpointerArguments(keep_frozen=False, keep_last=None))
    args = ts.TrainerArguments(
        epochs=epochs,
        train_batch_size=8,
        writers=[],
        progress="none",
        output_dir=folder,
        resume="auto",
        seed=1,
        **more,
    )
    trainer = ts.Trainer(module, args, callbacks=[one() for one in callbacks])
    trainer.train()
    return trainer


def last(trainer: ts.Trainer) -> ts.Checkpoint:
    return ts.read_checkpoint(trainer.output_dir / "checkpoints" / f"checkpoint-{trainer.state.global_step:09d}")


def kept(trainer: ts.Trainer) -> set[str]:
    return set(last(trainer).module_interface_state or {})


BODY = {"model.body.weight", "model.body.bias"}


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["head"], r=2))


@pytest.mark.parametrize(
    ("make", "callbacks"),
    [
        (Net, ()),
        (Net, (ts.callbacks.EMA,)),
        (Net, (Changes, ts.callbacks.EMA)),
        (Teacher, ()),
        (adapted, ()),
    ],
    ids=["frozen", "EMA", "unfrozen for an epoch", "teacher", "PEFT"],
)
def test_a_run_that_is_resumed_twice_has_the_same_bits(
    make: Callable[[], nn.Module], callbacks: tuple[Callable[[], ts.Callback], ...], tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", 3, make, callbacks)
    for epochs in (1, 2, 3):
        parts = train(tmp_path / "parts", epochs, make, callbacks)

    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, parts.module.state_dict()[name]), name
    one, other = last(whole), last(parts)
    assert one.module_interface_state.keys() == other.module_interface_state.keys()
    assert repr(one.callback_states) == repr(other.callback_states)


def test_changed_weights_are_kept_and_the_manifest_names_others(tmp_path: Path) -> None:
    buffers = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    trainer = train(tmp_path / "net", 1)
    checkpoint = last(trainer)

    assert kept(trainer) == set(trainer.module.state_dict()) - BODY >= buffers
    assert checkpoint.metadata["left_out"].keys() == BODY
    assert checkpoint.metadata["left_out"]["model.body.weight"].startswith("float32 [8, 6] ")
    assert kept(train(tmp_path / "teacher", 1, Teacher)) >= {"model.body.weight"}
    assert "model.body.bias" not in kept(train(tmp_path / "teacher", 2, Teacher))
    for epochs, names in ((1, set()), (2, BODY), (3, BODY)):  # also in the third epoch, in which it is frozen again
        assert kept(train(tmp_path / "changes", epochs, callbacks=(Changes,))) & BODY == names


def test_ema_keeps_no_averages_of_frozen_weights(tmp_path: Path) -> None:
    checkpoint = last(train(tmp_path, 1, callbacks=(ts.callbacks.EMA,)))
    state = next(state for key, state in checkpoint.callback_states.items() if "EMA" in key)

    assert set(state["frozen"]) == BODY
    assert not BODY & state["averages"].keys()


def test_another_base_is_refused_unless_its_weights_are_named(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2)
    train(tmp_path / "run", 1)
    ts.export_model(Net(), tmp_path / "base")
    with pytest.raises(CheckpointMismatchError, match=r"omits 2 frozen .* 2 of them differ.*model\.body\.weight"):
        train(tmp_path / "run", 2, lambda: Net(seed=5))
    again = train(tmp_path / "run", 2, lambda: Net(seed=5), init_weights_from=tmp_path / "base")

    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, again.module.state_dict()[name]), name


@pytest.mark.parametrize("keep", [True, False])
def test_the_option_may_change_between_two_runs(keep: bool, tmp_path: Path) -> None:
    first, second = (ts.DefaultCheckpointerArguments(keep_frozen=one) for one in (keep, not keep))
    whole = train(tmp_path / "whole", 2)
    train(tmp_path / "run", 1, checkpointer_args=first)
    trainer = train(tmp_path / "run", 2, checkpointer_args=second)

    assert (kept(trainer) >= BODY) is not keep
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, trainer.module.state_dict()[name]), name


def test_automatic_exports_omit_frozen_weights_and_explicit_ones_do_not(tmp_path: Path) -> None:
    trainer = train(tmp_path / "run", 1)
    export = next((tmp_path / "run" / "checkpoints").glob("*-model-*"))
    trainer.export(tmp_path / "all")
    text = (export / "README.md").read_text()

    assert not BODY & ts.read_model(export).keys()
    assert ts.read_model(tmp_path / "all").keys() >= BODY
    assert "2 frozen tensors are omitted" in text
    assert "load_state_dict(weights, strict=False)" in text


def test_diff_compares_digests_of_omitted_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 5):
        train(tmp_path / str(seed), 1, lambda seed=seed: Net(seed))
    paths = [str(tmp_path / seed / "checkpoints" / "checkpoint-000000002") for seed in "05"]

    assert main(["checkpoints", "diff", "--model", *paths]) == 1
    assert "model.left_out['model.body.weight']: 'float32 [8, 6] " in capsys.readouterr().out
    assert main(["checkpoints", "verify", paths[0]]) == 0


@pytest.mark.usefixtures("unprobed")
def test_a_private_run_resumes_from_its_adapters(tmp_path: Path) -> None:
    private = {
        "backend": "sp-dp",
        "differential_privacy_args": ts.DifferentialPrivacyArguments(noise_multiplier=1.0, delta=1e-4, debug_seed=3),
    }

    def make() -> nn.Module:
        model = Net()
        model.norm = nn.Identity()
        return model

    train(tmp_path, 1, make, **private)
    trainer = train(tmp_path, 2, make, **private)
    assert not BODY & kept(trainer)
    assert trainer.state.global_step == 4


def test_a_custom_checkpointer_gets_frozen_weights(tmp_path: Path) -> None:
    checkpointer = InMemory()
    module = ts.SupervisedModule(Net(), nn.functional.cross_entropy, "adamw", numbers(16))
    args = ts.TrainerArguments(epochs=1, train_batch_size=8, writers=[], progress="none", output_dir=tmp_path)
    ts.Trainer(module, args, checkpointer=checkpointer).train()

    names = {name for name, _ in module.named_parameters()}
    assert names <= set(checkpointer.kept[-1].module_interface_state or {})
