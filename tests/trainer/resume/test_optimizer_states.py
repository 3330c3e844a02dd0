"""States of optimizers and schedulers belong to parameters by their names, in any order."""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, train, weights
from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers import rank_states
from trainstack.backends import Workload, World
from trainstack.trainer.core.logs import RunLogger
from trainstack.trainer.resume.group_matching import Groups
from trainstack.trainer.resume.optimizer_states import OptimizerStates
from trainstack.trainer.schedulers.stepping import Schedules

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("a", "b", "c", "d", "e")
"""Parameters of one shape, so that shapes reveal no mistake."""
Make = Callable[..., torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.05),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "Adam with tensors as rates": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.05), foreach=False),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.05, momentum=0.5, centered=True),
}


class Vectors(nn.Module):
    """Parameters of one shape, registered in any order, with gradients that depend on name and step."""

    def __init__(self, order: Sequence[str] = NAMES) -> None:
        super().__init__()
        for name in order:
            start = torch.arange(4.0) + 10 * NAMES.index(name[0])
            self.register_parameter(name, nn.Parameter(start))

    def make_gradients(self, step: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.grad = torch.sin(torch.arange(4.0) * (step + 1) + NAMES.index(name[0]))


def groups_of(module: nn.Module, layout: Sequence[Sequence[str]], **options: dict[str, Any]) -> list[dict[str, Any]]:
    """A group for each list of names; the first name determines its options."""
    return [
        {"params": [getattr(module, name) for name in names], "lr": 0.01 * (1 + NAMES.index(names[0][0]) % 2)}
        for names in layout
    ]


def states_of(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], made: Sequence[Any] = ()
) -> OptimizerStates:
    return OptimizerStates(Workload.from_module(module, optimizers, World()), Schedules(made))


def step(module: Vectors, optimizers: Sequence[torch.optim.Optimizer], made: Sequence[Any], first: int) -> None:
    for number in range(first, first + 5):
        module.make_gradients(number)
        for one in (*optimizers, *made):
            one.step()


class CountsWalks(nn.Module):
    """Counts the walks over its parameters."""

    walks = 0

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

    def named_parameters(self, *given: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self.walks += 1
        return super().named_parameters(*given, **options)


@pytest.mark.parametrize("layers", [2, 20])
def test_the_number_of_optimizers_does_not_multiply_the_walks(layers: int) -> None:
    module = CountsWalks(layers)
    states = states_of(module, [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in module.layers])
    module.walks = 0
    states.update_state(states.get_state(), RunLogger())
    assert module.walks < 6


@pytest.mark.parametrize("layers", [2, 20])
def test_the_names_are_not_found_again_for_each_group(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls, names = CountsWalks(layers), itertools.count(), Groups.names
    monkeypatch.setattr(Groups, "names", lambda self: (next(calls), names(self))[1])
    states = states_of(module, [torch.optim.SGD([{"params": one.parameters()} for one in module.layers], lr=0.1)])
    states.update_state(states.get_state(), RunLogger())
    assert next(calls) < 10


def bits(module: nn.Module) -> dict[str, list[float]]:
    return {name: parameter.tolist() for name, parameter in sorted(module.named_parameters())}


LOG = RunLogger("ERROR")


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_permuted_parameters_and_groups_resume_with_the_same_bits(kind: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def shuffled(items: Sequence[Any]) -> list[Any]:
        return [items[place] for place in torch.randperm(len(items), generator=generator).tolist()]

    layout = [["a", "c"], ["b"], ["e", "d"]]
    module = Vectors()
    optimizer = MAKERS[kind](groups_of(module, layout))
    rate = schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.5, total_iters=3), schedulers.StepLR(optimizer, 2)],
        milestones=[3],
    )
    states = states_of(module, [optimizer], [rate])
    step(module, [optimizer], [rate], 0)
    saved = copy.deepcopy((module.state_dict(), states.get_state()))
    step(module, [optimizer], [rate], 5)

    other = Vectors(shuffled(NAMES))
    layout = shuffled([sorted(names, key=lambda name: names[0] != name) for names in layout])
    made = groups_of(other, layout)
    for group in made:
        group["params"] = shuffled(group["params"])
    again = MAKERS[kind](made)
    rate = schedulers.SequentialLR(
        again, [schedulers.LinearLR(again, 0.5, total_iters=3), schedulers.StepLR(again, 2)], milestones=[3]
    )
    restored = states_of(other, [again], [rate])
    other.load_state_dict(saved[0])
    restored.update_state(saved[1], LOG)
    restored.update_state(restored.get_state(), LOG)  # twice is the same as once
    step(other, [again], [rate], 5)

    assert bits(other) == bits(module)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda made: schedulers.LambdaLR(made, [lambda n: 0.9**n] * len(made.param_groups)),
    "OneCycleLR": lambda made: schedulers.OneCycleLR(
        made, [10 * group["lr"] for group in made.param_groups], total_steps=30, cycle_momentum=False
    ),
    "CyclicLR": lambda made: schedulers.CyclicLR(
        made,
        [group["lr"] for group in made.param_groups],
        [5 * group["lr"] for group in made.param_groups],
        step_size_up=3,
        cycle_momentum=False,
    ),
    "CosineAnnealingLR": lambda made: schedulers.CosineAnnealingLR(made, 20),
    "ChainedScheduler": lambda made: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(made, 0.9), schedulers.ConstantLR(made, 0.5, 4)]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_rates_follow_groups_that_come_in_another_order(kind: str) -> None:
    layouts = [["a"], ["b", "c"]], [["c", "b"], ["a"]]
    ends = []
    saved: Any = None
    for layout in layouts:
        module = Vectors(("a", "b", "c"))
        optimizer = torch.optim.SGD(groups_of(module, layout), lr=0.05, momentum=0.9)
        rate = SCHEDULES[kind](optimizer)
        states = states_of(module, [optimizer], [rate])
        if saved is None:
            step(module, [optimizer], [rate], 0)
            saved = copy.deepcopy((module.state_dict(), states.get_state()))
        else:
            module.load_state_dict(saved[0])
            states.update_state(saved[1], LOG)
        step(module, [optimizer], [rate], 5)
        ends.append(bits(module))

    assert ends[0] == ends[1]


def test_two_optimizers_are_matched_by_their_parameters() -> None:
    def make(order: str) -> tuple[Vectors, list[torch.optim.Optimizer], list[Any]]:
        module = Vectors(("a", "b"))
        made = [torch.optim.Adam([getattr(module, name)], lr=0.1) for name in order]
        rates = [
            schedulers.StepLR(one, 2, gamma=0.5 if name == "a" else 0.1) for name, one in zip(order, made, strict=True)
        ]
        return module, list(made), rates

    module, optimizers, rates = make("ab")
    states = states_of(module, optimizers, rates)
    step(module, optimizers, rates, 0)
    saved = copy.deepcopy((module.state_dict(), states.get_state()))
    step(module, optimizers, rates, 5)
    other, optimizers, rates = make("ba")
    other.load_state_dict(saved[0])
    states_of(other, optimizers, rates).update_state(saved[1], LOG)
    step(other, optimizers, rates, 5)

    assert bits(other) == bits(module)


def test_two_schedules_of_one_class_and_optimizer_keep_their_own_states() -> None:
    def make() -> tuple[Vectors, torch.optim.Optimizer, list[Any]]:
        module = Vectors(("a",))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return module, optimizer, [schedulers.ExponentialLR(optimizer, gamma) for gamma in (0.5, 0.9)]

    module, optimizer, rates = make()
    saved = copy.deepcopy(states_of(module, [optimizer], rates).get_state())
    again, optimizer, restored = make()
    states_of(again, [optimizer], restored).update_state(saved, LOG)
    assert [rate.gamma for rate in restored] == [0.5, 0.9]


def saved_of(layout: Sequence[Sequence[str]], make: Make = MAKERS["AdamW"]) -> dict[str, Any]:
    module = Vectors([name for names in layout for name in names])
    optimizer = make(groups_of(module, layout))
    step(module, [optimizer], [], 0)
    return states_of(module, [optimizer]).get_state()


def refusal(saved: dict[str, Any], layout: Sequence[Sequence[str]], make: Make = MAKERS["AdamW"]) -> str:
    module = Vectors([name for names in layout for name in names])
    with pytest.raises(ts.CheckpointMismatchError) as caught:
        states_of(module, [make(groups_of(module, layout))]).update_state(saved, LOG)
    return str(caught.value)


def test_a_renamed_parameter_is_refused_with_both_lists() -> None:
    message = refusal(saved_of([["a", "b"]]), [["a", "bb"]])
    assert "1 parameter that optimizer 0 (AdamW) lacks: b;" in message
    assert "1 parameter that the checkpoint lacks: bb." in message


def test_a_parameter_in_another_group_is_refused_with_both_groups() -> None:
    message = refusal(saved_of([["a", "c"], ["b"]]), [["a"], ["b", "c"]])
    assert "'c' of optimizer 0 (AdamW) is in group 1 (b, c); in the checkpoint it is in group 0 (a, c)" in message
    assert "is in group 1 (c)" in refusal(saved_of([["a", "c"], ["b"]]), [["a"], ["c"], ["b"]])
    assert "is in group 0 (a, b)" in refusal(saved_of([["a"], ["b"]]), [["a", "b"]])


def test_a_parameter_in_another_optimizer_is_refused_with_both() -> None:
    def make(first: str, second: str) -> tuple[Vectors, list[Any]]:
        module = Vectors(("a", "b", "c"))
        return module, [torch.optim.SGD([getattr(module, n) for n in names], lr=0.1) for names in (first, second)]

    module, optimizers = make("ab", "c")
    saved = states_of(module, optimizers).get_state()
    module, optimizers = make("a", "cb")
    with pytest.raises(
        ts.CheckpointMismatchError, match="'b' is in optimizer 1; in the checkpoint it is in optimizer 0"
    ):
        states_of(module, optimizers).update_state(saved, LOG)


class Tied(nn.Module):
    def __init__(self, order: Sequence[str], tied: bool = True) -> None:
        super().__init__()
        one, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        for name in order:
            self.register_parameter(name, one if tied or name == "a" else other)


def test_a_tied_parameter_is_found_by_each_of_its_names() -> None:
    moments = []
    saved: Any = None
    for order in ("ab", "ba"):
        module = Tied(order)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        states = states_of(module, [optimizer])
        if saved is None:
            next(iter(module.parameters())).grad = torch.ones(4)
            optimizer.step()
            saved = copy.deepcopy(states.get_state())
        else:
            states.update_state(saved, LOG)
        moments.append(optimizer.state[next(iter(module.parameters()))]["exp_avg"].tolist())
    assert moments[0] == moments[1]
    untied = Tied("ab", tied=False)
    with pytest.raises(ts.CheckpointMismatchError, match="1 parameter that the checkpoint lacks: b"):
        states_of(untied, [torch.optim.Adam(untied.parameters())]).update_state(saved, LOG)
    untied = Tied("ab", tied=False)
    saved = states_of(untied, [torch.optim.Adam(untied.parameters())]).get_state()
    module = Tied("ab")
    with pytest.raises(ts.CheckpointMismatchError, match=r"'a' and 'b' were two parameters .* are one now"):
        states_of(module, [torch.optim.Adam(module.parameters())]).update_state(saved, LOG)


def test_parameters_that_joined_during_training_join_again() -> None:
    def make() -> tuple[Vectors, torch.optim.Optimizer, OptimizerStates]:
        module = Vectors(("a", "b", "c"))
        optimizer = torch.optim.AdamW([module.a], lr=0.1)
        return module, optimizer, states_of(module, [optimizer])

    module, optimizer, states = make()
    optimizer.add_param_group({"params": [module.c], "lr": 0.7})
    optimizer.param_groups[0]["params"].append(module.b)
    step(module, [optimizer], [], 0)
    saved = copy.deepcopy((module.state_dict(), states.get_state()))
    assert saved[1]["optimizers"][0]["joined"] == ["b", "c"]
    step(module, [optimizer], [], 5)

    other, again, restored = make()
    other.load_state_dict(saved[0])
    restored.update_state(saved[1], LOG)
    restored.update_state(copy.deepcopy(restored.get_state()), LOG)
    step(other, [again], [], 5)

    assert bits(other) == bits(module)
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.7]
    assert restored.get_state()["optimizers"][0]["joined"] == ["b", "c"]


def test_a_missing_parameter_does_not_count_as_a_new_one() -> None:
    module = Vectors(("a", "b"))
    saved = saved_of([["a", "b"]])
    with pytest.raises(ts.CheckpointMismatchError, match=r"optimizer 0 \(AdamW\) lacks: b"):
        states_of(module, [torch.optim.AdamW([module.a])]).update_state(saved, LOG)


class Own(torch.optim.SGD):
    """Its state is a list with one entry for each parameter, without numbers."""

    def state_dict(self) -> Any:
        return {"moments": [self.state[p]["momentum_buffer"] for g in self.param_groups for p in g["params"]]}

    def load_state_dict(self, state: Any) -> None:
        parameters = [p for g in self.param_groups for p in g["params"]]
        for parameter, moment in zip(parameters, state["moments"], strict=True):
            self.state[parameter]["momentum_buffer"] = moment.clone()


class WithExtra(torch.optim.SGD):
    """The form of torch, and a list in addition."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow": [torch.zeros(4), torch.ones(4)], "count": 3}

    def load_state_dict(self, state: Any) -> None:
        self.extra = state["slow"], state["count"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Joint(torch.optim.SGD):
    """All parameters in one vector under the first, as in LBFGS, and an entry of no parameter."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for g in self.param_groups for p in g["params"]]
        self.state[parameters[0]]["direction"] = [torch.cat([p.grad for p in parameters if p.grad is not None])]
        self.state["calls"] = 4  # type: ignore[index]


@pytest.mark.parametrize("kind", [Own, WithExtra, Joint])
def test_a_state_for_one_order_is_refused_in_another(kind: type[torch.optim.SGD]) -> None:
    def make(groups: Any) -> torch.optim.Optimizer:
        return kind(groups, lr=0.1, momentum=0.9)

    saved = saved_of([["a", "b"]], make)
    message = refusal(saved, [["b", "a"]], make)
    assert "stores its state in the order of its parameters, and the order has changed" in message
    assert "Checkpoint: a, b. Now: b, a." in message
    module = Vectors(("a", "b"))
    optimizer = make(groups_of(module, [["a", "b"]]))
    states = states_of(module, [optimizer])
    states.update_state(copy.deepcopy(saved), LOG)
    again = states.get_state()["optimizers"][0]
    again.pop("attributes", None)  # `load_state_dict` has created one
    assert str(again) == str(saved["optimizers"][0])


class OfSome(torch.optim.SGD):
    """One vector for all parameters but the last, under the first."""

    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"][:-1]
        self.state[parameters[0]]["flat"] = torch.cat([p.grad for p in parameters if p.grad is not None])


class Scaled(torch.optim.SGD):
    """An option that has an item for each parameter."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["scales"] = [float(p.detach().sum()) for p in group["params"]]


@pytest.mark.parametrize("kind", [OfSome, Scaled])
def test_a_custom_state_by_position_is_refused_in_another_order(kind: type[torch.optim.SGD]) -> None:
    saved = saved_of([["a", "b", "c"]], kind)
    message = refusal(saved, [["c", "a", "b"]], kind)
    assert "stores its state in the order of its parameters, and the order has changed" in message
    assert "Checkpoint: a, b, c. Now: c, a, b." in message


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_subclass_of_torchs_optimizers_is_matched_by_names(kind: str) -> None:
    own = type("Renamed", (getattr(torch.optim, kind),), {})

    assert "ordered" not in saved_of([["a", "b"]], own)["optimizers"][0]
    assert "ordered" not in saved_of([["a", "b", "c"]], own)["optimizers"][0]


def test_the_state_of_lbfgs_depends_on_the_order() -> None:
    module = Vectors(("a", "b"))
    optimizer = torch.optim.LBFGS(module.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in module.parameters())
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert states_of(module, [optimizer]).get_state()["optimizers"][0]["ordered"]


def test_names_that_torch_keeps_in_a_group_follow_the_parameters() -> None:
    module = Vectors(("a", "b"))
    saved = states_of(module, [torch.optim.AdamW(module.named_parameters())]).get_state()
    other = Vectors(("b", "a"))
    optimizer = torch.optim.AdamW(other.named_parameters())
    states_of(other, [optimizer]).update_state(saved, LOG)
    assert optimizer.param_groups[0]["param_names"] == ["b", "a"]


def test_only_options_given_with_other_values_are_changes() -> None:
    def make(weight_decay: float) -> tuple[Vectors, Any, Any, OptimizerStates]:
        module = Vectors(("a", "b"))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=weight_decay)
        rate = schedulers.OneCycleLR(optimizer, 0.1, total_steps=20)  # writes lr, betas, and more
        return module, optimizer, rate, states_of(module, [optimizer], [rate])

    module, optimizer, rate, states = make(0.1)
    step(module, [optimizer], [rate], 0)
    optimizer.param_groups[0]["eps"] = 1e-6  # as a hook may
    saved = copy.deepcopy(states.get_state())
    same = make(0.1)[-1]
    same.update_state(saved, RunLogger("INFO"))
    assert same.changes == []
    for _ in range(2):  # the second time it is a run that still continues with 0.1
        resumed = make(0.2)[-1]
        resumed.update_state(saved, RunLogger("INFO"))
        [change] = resumed.changes
        assert (change.name, change.saved, change.given) == ("optimizers.0.weight_decay", "0.1", "0.2")
        saved = resumed.get_state()


class Collecting(Classifier):
    """Collects the names of its parameters in a set, so that their order depends on the hash seed."""

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        named = dict(self.named_parameters())
        self.order = list(set(named))
        decayed = {name for name in named if name.endswith("weight")}
        groups = [{"params": [named[name] for name in self.order if name in chosen], "weight_decay": decay}
                  for chosen, decay in ((decayed, 0.1), (set(named) - decayed, 0.0))]  # fmt: skip
        return torch.optim.AdamW(groups, lr=0.01, foreach=False), None


def run_collecting(folder: str, epochs: int) -> list[Any]:
    module = Collecting()
    saving = ts.DefaultCheckpointerArguments()
    train(module, folder, epochs=epochs, resume="auto", checkpointer_args=saving, clip_grads=False)
    return [module.order, weights(module).tolist()]


@pytest.mark.processes
def test_names_collected_in_a_set_resume_under_any_hash_seed(tmp_path: Path) -> None:
    call = "import json, sys; from tests.trainer.resume.test_optimizer_states import run_collecting as run; "
    call += "print(json.dumps(run(sys.argv[1], int(sys.argv[2]))))"
    _, expected = run_collecting(str(tmp_path / "whole"), 2)
    order, _ = run_collecting(str(tmp_path / "cut"), 1)

    def python(seed: int, *arguments: str) -> Any:
        command, environment = [sys.executable, "-c", *arguments], {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(60), check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    names = [name for name, _ in Collecting().named_parameters()]
    orders = "import json, sys; print(json.dumps(list(set(dict.fromkeys(sys.argv[1:])))))"
    seed = next(seed for seed in range(1, 99) if python(seed, orders, *names) != order)
    other, resumed = python(seed, call, str(tmp_path / "cut"), "2")

    assert other != order
    assert resumed == expected


@pytest.mark.processes
def test_a_zero_redundancy_optimizer_resumes_in_another_order(tmp_path: Path) -> None:
    for ranks in run_world(2, rank_states.zero, directory=str(tmp_path)):
        assert ranks["resumed"] == ranks["unbroken"]


def test_resuming_a_finished_run_reports_no_unused_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Watches(ts.Callback):
        def on_train_step_end(self, trainer: Any) -> None:
            pass

    for _ in range(2):
        saving = ts.DefaultCheckpointerArguments()
        ts.Trainer(
            Classifier(), arguments(tmp_path, resume="auto", checkpointer_args=saving), callbacks=[Watches()]
        ).train()
    assert "has never run" not in caplog.text
