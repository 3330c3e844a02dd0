"""State that differs between ranks is kept for each rank and restored there."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import rank_states
from trainstack.backends import Communicator
from trainstack.checkpointing.reading import read_states
from trainstack.trainer.resume.own_states import _redistribute, _without_buffers, take_own_states
from trainstack.trainer.resume.rank_states import apply_part, describe_place, divide_by_rank


class Replayed(Communicator):
    """Rank 0 of several ranks whose messages are known."""

    def __init__(self, others: list[dict[str, Any]]) -> None:
        self.size, self._others, self._turn = 1 + len(others), others, 0

    def gather(self, value: Any, what: str = "") -> list[Any]:
        self._turn += 1
        return [value, *(Recorder.record(other)[self._turn - 1] for other in self._others)]


class Recorder(Communicator):
    """A rank whose state differs from that of others; it records its messages."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def gather(self, value: Any, what: str = "") -> list[Any]:
        self.sent.append(value)
        return [value, "another"] if len(self.sent) == 1 else [value, []]

    @classmethod
    def record(cls, states: dict[str, Any]) -> list[Any]:
        recorder = cls()
        divide_by_rank(recorder, states, ())
        return recorder.sent


def places(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    _, found = divide_by_rank(Replayed([theirs]), {"module": mine}, ())
    return sorted(map(describe_place, found))


W = torch.ones(2)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": {"x", "y", "z"}}, {"a": {"z", "y", "x"}}, []),
        ({"a": {1: [{"b", "c"}]}}, {"a": {1: [{"c", "b"}]}}, []),
        ({"a": 1}, {"a": 1.0}, ["module.a"]),
        ({"a": True}, {"a": 1}, ["module.a"]),
        ({"a": 0.0}, {"a": -0.0}, ["module.a"]),
        ({"a": float("nan")}, {"a": float("nan")}, []),
        ({"a": deque([1], 2)}, {"a": deque([1], 3)}, ["module.a"]),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}, ["module.a"]),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}, ["module.a"]),
        ({"a": [torch.zeros(2)]}, {"a": [torch.tensor([0.0, -0.0])]}, ["module.a"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["module.a.c"]),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, ["module.a"]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": [1]}}, ["module.a.b"]),
        ({"a": {}}, {"a": {"b": 1}}, ["module.a"]),
        (
            {"a": OrderedDict([("b", 1), ("c", 1)])},
            {"a": OrderedDict([("c", 1), ("b", 1)])},
            ["module.a"],
        ),
    ],
)
def test_leaves_are_compared_by_bits_and_sets_without_order(mine: Any, theirs: Any, expected: Any) -> None:
    assert places(mine, {"module": theirs}) == expected


def test_a_part_replaces_the_leaves_of_its_tree() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": [3]}
    part = {"a": {"b": [10], "c": {"d": [], "f": [{"g": 1}]}}, "e": [[4]]}

    assert apply_part(tree, part) == {"a": {"b": 10, "c": {"f": {"g": 1}}}, "e": [4]}
    assert tree == {"a": {"b": 1, "c": {"d": 2}}, "e": [3]}


def test_leaves_of_buffers_are_split_from_the_others() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    context: Any = SimpleNamespace(module=module)
    mean, count, other = ["mean"], ["count"], ["other"]
    part = {"count": count, "state_dict": {"0.running_mean": mean, "0.weight": other}}

    assert _without_buffers(part, context) == (
        {"count": count, "state_dict": {"0.weight": other}},
        {"state_dict": {"0.running_mean": mean}},
    )
    assert _without_buffers(mean, context) == (mean, {})


class Summing(ts.Callback):
    """A callback that divides the sum of its counts among the ranks."""

    def redistribute_state(self, states: Any, rank: int, world_size: int) -> Any:
        return {"count": sum(state["count"] for state in states) / world_size}


def test_states_of_callbacks_that_redistribute_are_not_refused() -> None:
    context: Any = SimpleNamespace(
        module=Classifier(),
        world=SimpleNamespace(rank=0, size=4),
        events=SimpleNamespace(callbacks={"own": Summing(), "other": ts.Callback()}),
    )
    everyone = {"callbacks": [{"own": {"count": count}, "other": {"count": count}} for count in (1, 5)]}
    names = ["callbacks.other.count", "callbacks.own", "callbacks.own.count", "callbacks.owner.count"]

    made, refused = _redistribute(everyone, names, context)

    assert made == {"callbacks": {"own": {"count": 1.5}, "other": {"count": 1}}}
    assert refused == ["callbacks.other.count", "callbacks.owner.count"]


class Numbered(Classifier):
    def get_state(self) -> dict[str, Any]:
        return {"number": 0}


class Renumbered(Numbered):
    def redistribute_state(self, states: Any, rank: int, world_size: int) -> Any:
        return {"number": 10 * rank + len(states)}


@pytest.mark.parametrize(("kind", "number"), [(Numbered, 7), (Renumbered, 1)])
def test_initial_states_that_differ_get_a_warning_or_are_divided(kind: type[Numbered], number: int) -> None:
    said: list[str] = []
    none = SimpleNamespace(get_state=dict)
    context: Any = SimpleNamespace(
        module=kind(),
        world=SimpleNamespace(rank=0, size=2, comm=Replayed([{"module": {"number": 1}}])),
        events=SimpleNamespace(callbacks={}, get_state=dict),
        user_state=none,
        stack=none,
        log=SimpleNamespace(warning=said.append),
    )
    checkpoint = ts.Checkpoint(module_interface_state={"number": 7}, rng_state={"ranks": [None]})

    assert take_own_states(checkpoint, context, ["module"]).module_interface_state == {"number": number}
    assert len(said) == (kind is Numbered)
    assert all("differ between the ranks: module.number; and the checkpoint, of 1 rank," in one for one in said)


@pytest.mark.processes
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_rank_resumes_with_its_own_state(size: int, tmp_path: Path) -> None:
    ranks = run_world(size, rank_states.resumed, directory=str(tmp_path))
    for rank in ranks:
        assert rank["resumed"] == rank["unbroken"]
    assert ranks[0]["resumed"]["module"] != ranks[1]["resumed"]["module"]
    assert ranks[1]["resumed"]["counts"][0] == 1
    other = 1 if size == 3 else 3
    for message in run_world(other, rank_states.refused, directory=str(tmp_path)):
        assert f"these states differ between the {size} ranks" in message
        for name in ("module.own.generator", "module.own.last", "callbacks.Draws.count", "user_state.values.counts"):
            assert name in message
        assert "own.same" not in message
    for rank, (counts, place, world_size, count) in enumerate(
        run_world(other, rank_states.divided, directory=str(tmp_path))
    ):
        assert (len(counts), place, world_size) == (size, rank, other)
        assert count == counts[rank % size]


@pytest.mark.processes
def test_buffers_that_differ_between_ranks_are_kept_for_each(tmp_path: Path) -> None:
    ranks = run_world(2, rank_states.buffers, directory=str(tmp_path))
    for rank in ranks:
        assert rank["resumed"] == rank["unbroken"]
    assert ranks[0]["unbroken"] != ranks[1]["unbroken"]


def test_a_checkpointer_that_loses_rank_states_is_named(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    made = arguments(tmp_path, checkpointer_args=saving)
    trainer = ts.Trainer(Classifier(), made)

    @trainer.on(ts.Event.SAVE_CHECKPOINT)
    def as_if_of_two_ranks(trainer: Any, checkpoint: Any) -> None:
        checkpoint.trainer_state["differing"] = ["module.noise"]

    trainer.train()
    with pytest.raises(ts.CheckpointMismatchError, match=r"module\.noise; and DefaultCheckpointer has not stored"):
        _ = ts.Trainer(Classifier(), arguments(tmp_path, resume=True, checkpointer_args=saving)).plan


class Unstorable(Classifier):
    steps = 0

    def train_step(self, *given: Any, **named: Any) -> Any:
        self.steps += 1
        return super().train_step(*given, **named)

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "loss": torch.nn.MSELoss()}


def test_an_unstorable_state_is_found_before_the_first_step(tmp_path: Path) -> None:
    module = Unstorable()
    with pytest.raises(ts.UnsupportedStateError, match=r"module\.loss contains a torch\.nn\.modules\.loss\.MSELoss"):
        ts.Trainer(module, arguments(tmp_path, checkpointer_args=ts.DefaultCheckpointerArguments())).train()
    assert module.steps == 0
    ts.Trainer(module, arguments(tmp_path / "unsaved")).train()
    assert module.steps == 6


class MadeByAHook(Classifier):
    """Has no state before the first epoch."""

    def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
        self.level = epoch

    def get_state(self) -> dict[str, Any]:
        return {"weights": super().get_state(), "level": self.level}

    def update_state(self, state: Any) -> None:
        if state:
            super().update_state(state["weights"])


def test_a_state_that_a_hook_creates_is_saved(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    ts.Trainer(MadeByAHook(), arguments(tmp_path, checkpointer_args=saving)).train()
    assert ts.list_checkpoints(tmp_path / "checkpoints")


class Draws(Classifier):
    """Draws noise from a generator outside of its state, and has a generator of the operating system."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__(optimizer=torch.optim.AdamW)
        self.noise, self.stop_at = [torch.Generator().manual_seed(3)], stop_at
        self.system = random.SystemRandom()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        if global_step == self.stop_at:
            raise KeyboardInterrupt
        return super().train_step(global_step, batch, device) * torch.rand((), generator=self.noise[0])


def test_generators_of_a_module_are_saved_automatically(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    whole, cut, renamed = Draws(), Draws(), Draws()
    ts.Trainer(whole, arguments(tmp_path / "whole", checkpointer_args=saving)).train()
    assert "system: random numbers of the operating system have no state" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        ts.Trainer(Draws(4), arguments(tmp_path / "cut", checkpointer_args=saving)).train()
    ts.Trainer(cut, arguments(tmp_path / "cut", checkpointer_args=saving, resume=True)).train()
    assert torch.equal(weights(cut), weights(whole))
    renamed.moved = renamed.noise
    del renamed.noise
    _ = ts.Trainer(renamed, arguments(tmp_path / "cut", checkpointer_args=saving, resume=True)).plan
    assert "have other random generators than when the checkpoint was written" in caplog.text
    assert "moved[0], noise[0]" in caplog.text


class DrawsInHooks(Classifier):
    """Draws in the hooks that begin the training and an epoch, so that a checkpoint may keep states before them."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = [torch.Generator().manual_seed(3)]


class Draw(ts.Callback):
    def on_train_begin(self, trainer: Any) -> None:
        torch.rand(3, generator=trainer.module.noise[0])

    def on_train_epoch_begin(self, trainer: Any) -> None:
        torch.rand(3, generator=trainer.module.noise[0])


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("backend", ["sp", "sp-dp"])
def test_private_runs_store_no_generators_of_the_module(backend: str, tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    given: dict[str, Any] = {"backend": backend, "checkpointer_args": saving}
    ts.Trainer(DrawsInHooks(), arguments(tmp_path, **given), callbacks=[Draw()]).train()
    ts.Trainer(DrawsInHooks(), arguments(tmp_path, **given, resume=True, epochs=5), callbacks=[Draw()]).train()

    begins = 0
    for one in [it for it in ts.list_checkpoints(tmp_path / "checkpoints") if it.kind == "checkpoint"]:
        rank = read_states(one.path)[1]["rng_state"]["ranks"][0]
        begins += str(rank["begin"]).count("generators")
        assert bool(rank.get("generators")) == (backend == "sp")
    assert (begins > 0) == (backend == "sp")
