"""Trials restore all values that a checkpoint keeps, and name changed values outside of any state."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import trainstack as ts
from tests.helpers.beginnings import Begins, begun, unlike
from tests.helpers.modules import Classifier, arguments, numbers, weights
from trainstack.checkpointing.difference import differences
from trainstack.trainer.core.state_tree import OldState, copied, with_old_values
from trainstack.trainer.core.untracked import changed_attributes, fingerprints
from trainstack.trainer.data.dataset_snapshot import DatasetSnapshot

TRIALS: dict[str, dict[str, Any]] = {
    "fit_micro_batch": {"fit_micro_batch": True},
    "sanity_val_steps": {"sanity_val_steps": 2},
    "find_lr": {},
}


class Counting(Classifier):
    """Counts the samples that its steps have seen."""

    seen = 0

    def count(self, batch: Any) -> None:
        self.seen += len(batch[0])

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.count(batch)
        return super().train_step(global_step, batch, device)

    def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.count(batch)
        return super().val_step(global_step, batch, device)


class Keeping(Counting):
    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "seen": self.seen}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])
            self.seen = state["seen"]


def tried(module: Any, directory: Path, trial: str | None, **more: Any) -> ts.Trainer:
    trainer = ts.Trainer(module, arguments(directory, **(TRIALS[trial] if trial else {})), **more)
    if trial == "find_lr":
        ts.find_lr(trainer, start=1e-3, end=1e-2, steps=3)
    return trainer


@pytest.mark.parametrize("trial", TRIALS)
def test_a_counter_in_the_modules_state_is_restored(
    trial: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    for one in (None, trial):
        module = Keeping(numbers(16), validate=True)
        tried(module, tmp_path, one).train()
        seen.append(module.seen)

    assert seen == [32, 32]
    assert "ran trial steps that changed" not in caplog.text


@pytest.mark.parametrize("trial", TRIALS)
def test_a_changed_attribute_outside_of_states_is_named(
    trial: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Counting(numbers(16), validate=True)
    module.net[0].calls = [np.float64(0)]
    module.net[0].register_forward_hook(lambda part, *_: part.calls.append(len(part.calls)))
    tried(module, tmp_path, trial).train()

    (message,) = [one for one in caplog.messages if "ran trial steps that changed" in one]
    assert message.startswith(trial)
    assert "Counting.net.0.calls, Counting.seen. Only the result of get_state was restored." in message


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@cache
def plain(directory: Path) -> Begins:
    return begun(directory, "hook", "advance", set())


@pytest.mark.parametrize("trial", TRIALS)
def test_runs_with_trials_have_the_bits_of_one_without(trial: str, directory: Path, tmp_path: Path) -> None:
    """The run has six interruptions, each followed by another trial."""
    stops = {1, 4, 5, 6, 9, 12}
    changes = {**TRIALS[trial], "search": trial == "find_lr"}
    module = plain(directory)
    broken = begun(tmp_path / "broken", "hook", "advance", set(stops), **changes)
    begun(tmp_path / "unbroken", "hook", "advance", set(), **changes)

    assert unlike(directory, tmp_path / "unbroken") == []
    assert unlike(directory, tmp_path / "broken") == []
    assert module.keeps.state()["draws"] == broken.keeps.state()["draws"]


class Remembers(ts.Callback):
    kept: Any = None

    def get_state(self) -> dict[str, Any]:
        return {} if self.kept is None else {"kept": self.kept}

    def update_state(self, state: Any) -> None:
        self.kept = state.get("kept")


class Meddles(Keeping):
    """Changes everything that a checkpoint keeps, within a step."""

    trainer: Any = None
    meddles = False

    def count(self, batch: Any) -> None:
        super().count(batch)
        if not self.meddles:
            return
        trainer = self.trainer
        trainer.user_state["note"], trainer.user_state["list"] = 2.0, [3]
        trainer.user_state["tensor"] += 1
        trainer.history.update_metric("meddled", 1.0, step=1, epoch=0)
        trainer.history.update_metric("known", 2.0, step=1, epoch=0)
        for callback in trainer.events.callbacks.values():
            callback.kept = self.seen
        torch.rand(3), np.random.rand()
        trainer.state.skipped_steps += 1
        trainer.optimizers[0].param_groups[0]["lr"] = 5.0
        with torch.no_grad():
            self.net[0].bias.add_(0.0)


@pytest.mark.parametrize("trial", TRIALS)
def test_each_change_of_a_step_is_undone(trial: str, tmp_path: Path) -> None:
    module = Meddles(numbers(16), optimizer=torch.optim.AdamW, scheduler=True, validate=True)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    args = arguments(tmp_path, checkpointer_args=saving, backend="sp-amp", **TRIALS[trial])
    trainer = ts.Trainer(module, args, callbacks=[Remembers()])
    module.trainer = trainer
    trainer.user_state["tensor"], trainer.user_state["note"] = torch.zeros(2), 1.0
    trainer.history.update_metric("known", 1.0, step=0, epoch=0)
    before: list[Any] = []

    def states() -> dict[str, Any]:
        taken = copied(vars(trainer._take_checkpoint()))
        del taken["rng_state"]["ranks"][0]["begin"]
        taken["metadata"].pop("samples", None)  # hashed when training begins
        return taken  # type: ignore[no-any-return]

    trainer.on(ts.Event.TRAIN_BEGIN)(lambda trainer: before.append(states()))
    _ = trainer.plan
    reference = states()
    module.meddles = trial != "find_lr"
    if trial == "find_lr":
        module.meddles = True
        ts.find_lr(trainer, start=1e-3, end=1e-2, steps=3)
        module.meddles = False
    else:
        trainer.on(ts.Event.TRAIN_BEGIN)(lambda trainer: setattr(module, "meddles", False))
    trainer.train()

    assert [str(row) for row in differences(reference, before[0])] == []


@pytest.mark.parametrize("trial", ["fit_micro_batch", "sanity_val_steps"])
def test_a_generator_of_the_module_is_restored(trial: str, tmp_path: Path) -> None:
    class Draws(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(16), validate=True)
            self.generator = np.random.default_rng(1)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.generator.random()
            return super().train_step(global_step, batch, device)

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.generator.random()
            return super().val_step(global_step, batch, device)

    module, begins = Draws(), []
    trainer = ts.Trainer(module, arguments(tmp_path, **TRIALS[trial]))
    trainer.on(ts.Event.TRAIN_BEGIN)(lambda trainer: begins.append(module.generator.bit_generator.state))
    trainer.train()
    assert begins == [np.random.default_rng(1).bit_generator.state]


class Locked(Keeping):
    """Returns objects that cannot be copied."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.lock = threading.Lock()

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "lock": self.lock, "locks": [self.lock, 1]}


@pytest.mark.parametrize("trial", [None, *TRIALS])
def test_trials_work_with_states_that_cannot_be_copied(trial: str | None, tmp_path: Path) -> None:
    module = Locked(numbers(16), validate=True)
    saving = ts.DefaultCheckpointerArguments(checkpoint=False)
    changes = TRIALS[trial] if trial else {}
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2, checkpointer_args=saving, **changes))
    if trial == "find_lr":
        ts.find_lr(trainer, start=1e-3, end=1e-2, steps=3)
    trainer.train()

    assert module.seen == 64


LARGE: dict[str, Any] = {
    "dict": {index: float(index) for index in range(200_000)},
    "dicts": {outer: dict.fromkeys(range(1000), 0.0) for outer in range(20)},
    "dict of texts": dict.fromkeys(range(100), "x" * 1000),
    "list": list(range(5000)),
    "lists": [[0] * 100] * 100,
    "text": "x" * 2**17,
    "texts": ["x" * 1000] * 100,
    "array": np.zeros(2**14),
}


@pytest.mark.parametrize("kind", LARGE)
def test_old_values_of_large_states_are_not_kept(kind: str) -> None:
    state = {"module": {"weights": {"w": torch.zeros(2)}, "large": LARGE[kind], "count": 1, "few": {"a": [1], "b": {}}}}
    old = OldState(state, lambda leaf: False)
    smaller = {**state["module"], "large": type(LARGE[kind])() if kind != "array" else 0, "count": 2}
    smaller |= {"few": {"a": [2], "b": {"c": 1}}, "new": LARGE["dict"]}
    for now in ({"module": {**state["module"], "count": 2}}, {"module": smaller}):
        difference = old.differing(now)
        assert len(str(difference)) < 500
        back = with_old_values(now, difference)["module"]
        assert back.pop("large") is now["module"]["large"] or kind.startswith("dict")
        assert back == {key: value for key, value in state["module"].items() if key != "large"}


def test_a_state_that_lost_a_large_tensor_is_unchanged() -> None:
    averages = {"a": torch.zeros(2**15), "b": torch.zeros(2)}
    old = OldState({"callbacks": {"EMA": {"averages": averages, "n": 1}, "Other": {"n": 1}}}, lambda leaf: False)
    frozen = {"averages": {"b": torch.ones(2)}, "frozen": ["a"], "n": 2}
    now = {"callbacks": {"EMA": frozen, "Other": {"n": 2}}}

    assert with_old_values(now, old.differing(now)) == {"callbacks": {"EMA": frozen, "Other": {"n": 1}}}


def test_weights_that_a_hook_left_alone_keep_their_later_values() -> None:
    class Own(torch.Tensor):
        pass

    weights = {"plain": torch.ones(2), **{name: torch.ones(2).as_subclass(Own) for name in ("own", "hooked")}}
    old = OldState({"module": weights}, lambda leaf: True)
    old.drop_unchanged_weights({"module": weights | {"hooked": 2 * weights["hooked"]}})
    difference = old.differing({"module": {name: 3 * weight for name, weight in weights.items()}})
    assert difference is not None
    assert [path for path, _ in difference["values"]] == [["module", "hooked"]]


class Fetches(Dataset[Any]):
    """Samples that depend on the number of earlier fetches."""

    def __init__(self, *, opened: bool) -> None:
        self.base, self.count, self.last, self.sums = numbers(32), 0, [0], np.zeros(2)
        self.file = threading.Lock() if opened else None

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Any:
        self.count, self.last[0] = self.count + 1, index
        self.sums += 1
        inputs, label = self.base[index]
        return inputs * (1 + self.count / 100 + self.sums[0] / 100), label


@pytest.mark.parametrize("trial", ["fit_micro_batch", "sanity_val_steps", "find_lr"])
def test_trials_restore_the_plain_attributes_of_datasets(
    trial: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, tried_out = (Classifier(Subset(Fetches(opened=False), range(32)), validate=True) for _ in range(2))
    sums = tried_out.dataset.dataset.sums
    tried(plain, tmp_path / "plain", None).train()
    tried(tried_out, tmp_path / "tried", trial).train()
    opened = Classifier(Subset(Fetches(opened=True), range(32)), validate=True)
    tried(opened, tmp_path / "opened", trial).train()

    assert torch.equal(weights(tried_out), weights(plain))
    assert tried_out.dataset.dataset.sums is sums
    assert vars(tried_out.dataset.dataset)["count"] == vars(plain.dataset.dataset)["count"]
    names = "dataset.dataset.count, dataset.dataset.last, dataset.dataset.sums"
    assert caplog.text.count(f"changed attributes of datasets: {names}. They keep the new values") == 1


def test_a_list_of_other_objects_of_a_dataset_is_not_restored() -> None:
    module, first, second = Classifier(numbers(4)), object(), object()
    module.dataset.things, module.dataset.count = [first], 0
    snapshot = DatasetSnapshot(module)
    module.dataset.things[0], module.dataset.count = second, 1
    assert snapshot.restore() == []
    assert (module.dataset.things, module.dataset.count) == ([second], 0)


def test_large_nested_data_of_a_dataset_is_not_searched_completely() -> None:
    module = Classifier(numbers(4))
    module.dataset.rows = [[[0.0] * 1000] * 1000] * 1000  # the search of so many items would take minutes
    module.dataset.count = 0
    snapshot = DatasetSnapshot(module)
    module.dataset.count = 1
    assert snapshot.restore() == []
    assert module.dataset.count == 0


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (random.Random(0), random.Random.random),
        (np.random.RandomState(0), np.random.RandomState.random),
        (np.random.default_rng(0), np.random.Generator.random),
        (torch.Generator(), lambda generator: torch.rand(1, generator=generator)),
    ],
)
def test_a_drawn_number_is_a_change_of_its_generator(generator: Any, draw: Any) -> None:
    module: Any = torch.nn.Identity()
    module.noise = [generator]
    before = fingerprints(module)
    assert changed_attributes(module, before) == []
    draw(generator)
    assert changed_attributes(module, before) == ["noise"]
