"""State that a forward pass leaves to the next one of the same private step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.backends.dp.test_sealed_state import BATCH, Net, private_trainer, sums_of
from tests.helpers.modules import arguments
from trainstack.backends.dp.sealed import attribute_watch, sealed_state
from trainstack.backends.dp.sealed.snapshot import Snapshot
from trainstack.errors import PrivacyError


class Carries(Net):
    """Writes into one of several places in each forward pass; `found` has the values that a pass found there."""

    shared: ClassVar[list[float]] = []

    def __init__(self, place: str, found: list[Any]) -> None:
        super().__init__(0.5)
        self.place, self.tell = place, found.append
        self.mean: Any = None
        self.recent: list[float] = []
        self.by_name = {"inner": {"mean": 0.0}}
        self.array, self.tensor = np.zeros(3), torch.zeros(3)
        self.groups = False

    def here(self) -> Any:
        name = self.place
        if name == "layer":
            return getattr(self.net, "mean", None)
        if name == "class":
            return [*type(self).shared]
        value = getattr(self, {"list": "recent", "dict": "by_name", "data": "tensor"}.get(name, name))
        return repr(value)

    def write(self, value: float) -> None:
        name = self.place
        if name == "mean":
            self.mean = value
        elif name == "layer":
            self.net.mean = value
        elif name == "class":
            type(self).shared.append(value)
        elif name == "list":
            self.recent.append(value)
        elif name == "dict":
            self.by_name["inner"]["mean"] = value
        elif name == "array":
            self.array[0] = value
        elif name == "tensor":
            self.tensor[0] = value
        else:
            self.tensor.data[0] = value

    def remember(self, step: int, x: Tensor) -> None:
        self.tell((step, self.here()))
        branch = 2.0 if self.groups and bool(x.sum() > 0) else 1.0
        if step >= 3:
            self.write(branch if self.groups else float(x.sum()))


PLACES = ["mean", "layer", "class", "list", "dict", "array", "tensor", "data"]


def run_in_parts(directory: Any, module: ts.ModuleInterface, mode: Any, limit: int | None, *callbacks: Any) -> None:
    private = ts.DifferentialPrivacyArguments(
        delta=1e-4, noise_multiplier=1.0, debug_seed=7, accountant="rdp", grad_mode=mode
    )
    args = arguments(
        directory,
        backend="sp-dp",
        differential_privacy_args=private,
        epochs=1,
        train_batch_size=BATCH,
        gpu_batch_size_limit=limit,
        writers=[],
    )
    ts.Trainer(module, args, callbacks=list(callbacks)).train()


@pytest.mark.parametrize(
    ("case", "place"),
    [*(("loop", place) for place in PLACES), ("parts", "dict"), ("groups", "mean"), ("groups", "list")],
)
def test_each_forward_pass_of_a_step_has_equal_attributes(
    case: str, place: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribute_watch.AttributeWatch, "check", lambda *given, **named: None)  # makes passes too
    found: list[Any] = []
    made = type("Made", (Carries,), {"shared": [], "__module__": __name__})(place, found)
    made.groups = case == "groups"
    run_in_parts(tmp_path, made, "bookkeeping" if made.groups else "loop", 4 if case == "parts" else None)
    steps = {step for step, _ in found}
    assert max(steps) >= 4
    for step in range(2, max(steps) + 1):
        values = [value for at, value in found if at == step]
        assert len(values) > 1
        assert all(value == values[0] for value in values), (step, values)


def test_values_set_by_a_hook_between_micro_batches_stay(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_watch.AttributeWatch, "check", lambda *given, **named: None)

    class Numbers(ts.Callback):
        parts = 0

        def on_train_batch_begin(self, trainer: Any) -> None:
            self.parts += 1
            trainer.module.part = self.parts

    found: list[int] = []

    class Reads(Net):
        part = 0

        def remember(self, step: int, x: Tensor) -> None:
            found.append(self.part)
            self.part = -1

    numbers = Numbers()
    run_in_parts(tmp_path, Reads(0.5), "bookkeeping", 4, numbers)
    assert numbers.parts > 4
    assert [part for part in found if part > 0] == list(range(1, numbers.parts + 1))


def test_values_that_a_hook_collects_in_containers_stay(tmp_path: Any) -> None:
    class Collects(Net):
        def __init__(self) -> None:
            super().__init__(0.5)
            self.steps: list[int] = []
            self.by_name = {"inner": {"count": 0}}

        def on_end_train_step(self, global_step: int) -> None:
            self.steps.append(global_step)
            self.by_name["inner"]["count"] += 1

    module = Collects()
    number = len(sums_of(tmp_path, module))
    assert module.steps == list(range(1, number + 1))
    assert module.by_name == {"inner": {"count": number}}


def test_a_buffer_reverted_by_the_next_record_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Toggles(Net):
        def remember(self, step: int, x: Tensor) -> None:
            if step >= 2:
                self.buffer.data.copy_(torch.zeros(5) if bool(self.buffer.any()) else x.mean(0))

    monkeypatch.setattr(sealed_state, "_PASSES", 1)
    with pytest.raises(PrivacyError, match="buffer has changed, but not by an optimizer step"):
        sums_of(tmp_path, Toggles(0.5))


class LateList(Net):
    """Shifts by a list that it writes into from step 3 on, long after the first value."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.kept = [0.0]
        self.deep = ({"mean": [0.0]},)

    def shift(self) -> Tensor:
        return torch.as_tensor(self.kept[0] + self.deep[0]["mean"][0])

    def remember(self, step: int, x: Tensor) -> None:
        if step >= 3:
            self.deep[0]["mean"][0] += float(x.mean())


def test_a_write_into_a_container_is_found_in_its_step(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribute_watch, "_FIRST", 0)
    monkeypatch.setattr(attribute_watch, "_SHARE", -1.0)
    with pytest.raises(PrivacyError, match="deep changed") as raised:
        private_trainer(tmp_path, LateList(), grad_mode="loop").train()
    assert "global step 3" in " ".join(raised.value.__notes__)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_number_derived_from_a_forward_pass_is_refused(keeps: bool, tmp_path: Any) -> None:
    class Follows(Net):
        last: Any = None
        alpha = 1.0

        def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
            loss = super().train_step(global_step, batch, device)
            if keeps:
                self.last = loss.detach()
            return self.alpha * loss

        def on_end_train_step(self, global_step: int) -> None:
            self.alpha = float(self.last) if keeps else 1.0 / (1 + global_step)

    trainer = private_trainer(tmp_path, Follows(0.5), grad_mode="loop")
    if keeps:
        with pytest.raises(PrivacyError, match="alpha changed in the course of training"):
            trainer.train()
    else:
        trainer.train()
        assert "changes of alpha during training" in trainer.privacy_statement().not_covered


def test_a_number_set_by_a_torch_forward_hook_is_refused(tmp_path: Any) -> None:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__(0.5)
            self.net.register_forward_hook(self.note)

        def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
            if self.step >= 3:
                layer.mean = float(output.detach().mean())

        def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
            self.step = global_step
            return (1.0 + getattr(self.net, "mean", 0.0)) * super().train_step(global_step, batch, device)

    with pytest.raises(PrivacyError, match=r"net\.mean, step changed in the course of training"):
        private_trainer(tmp_path, Hooked(), grad_mode="loop").train()


def test_a_snapshot_restores_values_and_contents() -> None:
    module = nn.Module()
    module.items, module.table, module.values = [1, [2]], {"a": np.zeros(2)}, torch.zeros(2)
    module.large = torch.zeros(2**19)
    items, inner = module.items, module.items[1]
    snapshot = Snapshot(module)
    assert snapshot.changed() == set()
    inner.append(3)
    module.items = [*items, 4]
    module.table["a"][0], module.values.data[1] = 1.0, 1.0
    module.new = 1
    module.large[0] = 1.0
    assert snapshot.changed() == {("", name) for name in ("items", "table", "values", "new", "large")}
    snapshot.restore()
    assert module.items is items
    assert module.items[1] is inner
    assert items == [1, [2]]
    assert not module.table["a"].any()
    assert not module.values.any()
    assert not hasattr(module, "new")
    assert snapshot.changed() == {("", "large")}  # which is too large for a copy


def test_a_snapshot_removes_new_attributes_of_a_class_without_data() -> None:
    class Empty(nn.Module):
        pass

    snapshot = Snapshot(Empty())
    Empty.mean = 1.0  # type: ignore[assignment]
    assert {key for _, key in snapshot.changed()} == {"mean"}
    snapshot.restore()
    assert not hasattr(Empty, "mean")


def test_weights_computed_in_each_pass_are_not_kept_state(tmp_path: Any) -> None:
    class Normed(Net):
        alpha = 1.0

        def __init__(self) -> None:
            super().__init__(0.5)
            with pytest.warns(FutureWarning):
                nn.utils.weight_norm(self.net)

        def on_end_train_step(self, global_step: int) -> None:
            self.alpha = 1.0 / (1 + global_step)

        def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
            return self.alpha * super().train_step(global_step, batch, device)

    trainer = private_trainer(tmp_path, Normed(), grad_mode="loop")
    trainer.train()
    assert "changes of alpha during training" in trainer.privacy_statement().not_covered
