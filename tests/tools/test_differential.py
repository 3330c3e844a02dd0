"""Random trainings agree with a plain loop, and on several ranks with `sp`; both batteries find planted faults."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.processes import rank_pool
from tools.differential.__main__ import cases_of, main
from tools.differential.case import draw
from tools.differential.classes import CLASSES, PENDING, classes_of
from tools.differential.comparison import run_case
from tools.differential.rank_breaks import BREAKS
from tools.differential.rank_cases import SIZES, depends_on_split, draw_for_ranks
from tools.differential.rank_classes import RANK_CLASSES, RANK_PENDING, rank_classes_of
from tools.differential.rank_command import chosen_cases
from tools.differential.rank_comparison import RankBattery
from trainstack.backends.single_process import SingleProcess
from trainstack.trainer.evaluation.collector import OutputCollector
from trainstack.trainer.events.bus import Subscription
from trainstack.trainer.schedulers.stepping import Schedules
from trainstack.trainer.tracking.history import RunHistory

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("TEST_SEED", "0"))
PARTS, EACH = 8, 25
SHORT_PARTS = 4
"""The parts of `make test`; `make test-long` runs all."""
RANK_PARTS, EACH_ON_RANKS = 3, 10
MOST_TRIES_ON_RANKS = 12
MOST_TRIES = 40
"""The largest number of trainings until a broken library has to differ."""


# --- the battery


@pytest.mark.parametrize(
    "part", [*range(SHORT_PARTS), *(pytest.param(part, marks=pytest.mark.long) for part in range(SHORT_PARTS, PARTS))]
)
def test_random_trainings_equal_a_plain_loop(part: int) -> None:
    differ = []
    for case in islice(cases_of(SEED), part * EACH, (part + 1) * EACH):
        found = run_case(case)
        if found:
            differ.append("\n".join([case.describe(), *found[:3]]))
    assert not differ, "\n\n".join(differ[:3])


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"workers"}))
def test_trainings_of_a_class_equal_a_plain_loop(name: str) -> None:
    if name in PENDING:
        pytest.skip(f"differs as documented: {PENDING[name]}")
    case = next(cases_of(SEED, [name]))
    assert run_case(case) == [], case.describe()


@pytest.mark.processes
def test_a_training_with_a_worker_equals_a_plain_loop() -> None:
    if "workers" in PENDING:
        pytest.skip(f"differs as documented: {PENDING['workers']}")
    case = next(cases_of(SEED, ["workers"]))
    assert run_case(case) == [], case.describe()


def test_only_known_classes_are_pending() -> None:
    assert set(PENDING) <= set(CLASSES)


# --- drawn cases


def test_a_case_depends_on_seed_and_number_alone() -> None:
    drawn = [draw(3, number) for number in range(50)]
    assert [draw(3, number) for number in range(50)] == drawn
    assert len({case.describe() for case in drawn}) == len(drawn)
    assert draw(4, 0).describe() != drawn[0].describe()


def test_every_class_is_drawn() -> None:
    times = Counter(name for number in range(1000) for name in classes_of(draw(SEED, number)))
    rare = {name for name in CLASSES if times[name] < 3}
    assert rare == {"workers"}, "draw them more often"


# --- a library that is broken


def keeps_the_seed(patch: pytest.MonkeyPatch) -> None:
    """All backward passes with one weight begin with the same tensor."""
    seeds: dict[Any, Tensor] = {}

    def backward(self: SingleProcess, work: Any, loss: Tensor, weight: float) -> None:
        loss.backward(seeds.setdefault((weight, loss.dtype), torch.full((), weight, dtype=loss.dtype)))

    patch.setattr(SingleProcess, "backward", backward)


def doubles_gradients(patch: pytest.MonkeyPatch) -> None:
    backward = SingleProcess.backward
    patch.setattr(SingleProcess, "backward", lambda self, work, loss, weight: backward(self, work, loss, 2 * weight))


def weighs_all_alike(patch: pytest.MonkeyPatch) -> None:
    """A short last micro-batch has the weight of the others."""
    backward = SingleProcess.backward

    def weighed(self: SingleProcess, work: Any, loss: Tensor, weight: float) -> None:
        backward(self, work, loss, 0.5 if 0 < weight < 1 else weight)

    patch.setattr(SingleProcess, "backward", weighed)


def every(number: int, real: Callable[..., Any], instead: Any) -> Callable[..., Any]:
    """Calls `real`, except that each call whose count is a multiple of `number` only returns `instead`."""
    calls = 0

    def call(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return instead if calls % number == 0 else real(*given, **named)

    return call


def loses_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SingleProcess, "step", every(7, SingleProcess.step, True))


def loses_a_logged_value(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunHistory, "update_metric", every(19, RunHistory.update_metric, None))


def loses_an_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscription, "call", every(23, Subscription.call, None))


def loses_an_output(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutputCollector, "collect", every(11, OutputCollector.collect, None))


def loses_a_step_of_schedulers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Schedules, "step", every(13, Schedules.step, None))


def draws_a_random_number(patch: pytest.MonkeyPatch) -> None:
    clip = SingleProcess.clip

    def drawing(self: SingleProcess, work: Any) -> Tensor | None:
        torch.rand(1)
        return clip(self, work)

    patch.setattr(SingleProcess, "clip", drawing)


def omits_a_parameter_in_clipping(patch: pytest.MonkeyPatch) -> None:
    clip = SingleProcess.clip

    def omitting(self: SingleProcess, work: Any) -> Tensor | None:
        return clip(self, replace(work, params=work.params.clipping(work.optimized_params[1:])))

    patch.setattr(SingleProcess, "clip", omitting)


def does_not_zero_new_parameters(patch: pytest.MonkeyPatch) -> None:
    """Parameters that are added after the first step keep their gradients."""
    step, backward = SingleProcess.step, SingleProcess.backward
    first: dict[int, set[int]] = {}
    kept: list[tuple[Any, Tensor]] = []

    def keeping(self: SingleProcess, work: Any) -> bool:
        held = [p for one in work.optimizers for group in one.param_groups for p in group["params"]]
        known = first.setdefault(id(work.optimizers[0]), {id(p) for p in held})
        kept[:] = [(p, p.grad) for p in held if id(p) not in known and p.grad is not None]
        return step(self, work)

    def adding(self: SingleProcess, work: Any, loss: Tensor, weight: float) -> None:
        for p, gradient in kept:
            p.grad = gradient
        kept.clear()
        backward(self, work, loss, weight)

    patch.setattr(SingleProcess, "step", keeping)
    patch.setattr(SingleProcess, "backward", adding)


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    keeps_the_seed: "a view of a one-element parameter",
    doubles_gradients: "",
    weighs_all_alike: "",
    loses_a_step: "",
    loses_a_logged_value: "",
    loses_an_event: "",
    loses_an_output: "",
    loses_a_step_of_schedulers: "",
    draws_a_random_number: "",
    omits_a_parameter_in_clipping: "",
    does_not_zero_new_parameters: "parameters that are added within an epoch",
}
"""Ways to break the library, each with the class of trainings that shows it; empty for trainings of all kinds."""


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_a_broken_library_is_found(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = BROKEN[breaks]
    if name in PENDING:
        pytest.skip(f"differs as documented: {PENDING[name]}")
    breaks(monkeypatch)
    assert any(run_case(case) for case in islice(cases_of(SEED, [name] if name else []), MOST_TRIES))


# --- several ranks


@pytest.fixture(scope="module")
def battery() -> RankBattery:
    return RankBattery(rank_pool())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("part", "size"),
    [
        pytest.param(part, size, marks=[pytest.mark.long] if (part, size) != (0, SIZES[0]) else [])
        for part in range(RANK_PARTS)
        for size in SIZES
    ],
)
def test_random_trainings_on_several_ranks_equal_one_process(part: int, size: int, battery: RankBattery) -> None:
    differ = []
    for chosen in islice(chosen_cases(SEED, size), part * EACH_ON_RANKS, (part + 1) * EACH_ON_RANKS):
        found = battery.run(chosen)
        if found:
            differ.append("\n".join([chosen.case().describe(), *found[:3]]))
    assert not differ, "\n\n".join(differ[:3])


@pytest.mark.processes
@pytest.mark.parametrize("seed", [SEED, *(pytest.param(SEED + part, marks=pytest.mark.long) for part in range(1, 20))])
def test_random_trainings_under_fsdp_equal_one_process(seed: int, battery: RankBattery) -> None:
    differ = []
    for chosen in islice(chosen_cases(seed, 2, backend="fsdp"), 6 if seed == SEED else 30):
        found = battery.run(chosen)
        if found:
            differ.append("\n".join([chosen.case().describe(), *found[:3]]))
    assert not differ, "\n\n".join(differ[:3])


QUICKLY_FOUND = ("gives_unused_parameters_zeros", "wraps_once")
"""The breaks that `make test` tries; `make test-long` tries all."""


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [name if name in QUICKLY_FOUND else pytest.param(name, marks=pytest.mark.long) for name in BREAKS]
)
def test_a_broken_ddp_is_found(name: str, battery: RankBattery) -> None:
    shown_by = BREAKS[name][1]
    cases = islice(chosen_cases(SEED, 2, [shown_by] if shown_by else []), MOST_TRIES_ON_RANKS)
    assert any(battery.run(chosen, name) for chosen in cases)


@pytest.mark.processes
def test_a_training_on_ranks_is_simplified_as_long_as_it_differs(battery: RankBattery) -> None:
    cases = chosen_cases(SEED, 2, ["parameters that not every step uses"])
    chosen = next(one for one in cases if battery.run(one, "gives_unused_parameters_zeros"))
    simple = battery.shrink(chosen, "gives_unused_parameters_zeros", ["hooks", "subscribers", "epochs"])

    assert simple.simplest
    assert battery.run(simple, "gives_unused_parameters_zeros")
    assert battery.run(simple) == []


def test_trainings_on_ranks_depend_on_seed_number_and_size_alone() -> None:
    drawn = [draw_for_ranks(3, number, size) for number in range(30) for size in SIZES]
    assert [draw_for_ranks(3, number, size) for number in range(30) for size in SIZES] == drawn
    assert len({case.describe() for case in drawn}) == len(drawn)


def test_every_class_of_ranks_is_drawn_and_most_compare_with_sp() -> None:
    drawn = [draw_for_ranks(SEED, number, size) for number in range(400) for size in SIZES]
    times = Counter(name for case in drawn for name in rank_classes_of(case))
    assert not {name for name in RANK_CLASSES if times[name] < 3}, "draw them more often"
    assert sum(not depends_on_split(case) for case in drawn) > 0.9 * len(drawn)


def test_only_known_classes_of_ranks_are_pending() -> None:
    assert set(RANK_PENDING) <= set(RANK_CLASSES)


# --- the command


def test_a_difference_is_printed_with_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        doubles_gradients(patch)
        assert main(["--seed", "3", "--cases", "6"]) == 1
        printed = capsys.readouterr().out
        again = re.search(r"again: python -m tools.differential (--seed 3 --case \d+)", printed)
        assert again is not None, printed
        assert main(again[1].split()) == 1
        assert re.search(r"case \d+ of seed 3\n", capsys.readouterr().out)

    assert main(again[1].split()) == 0
    assert "1 trainings" in capsys.readouterr().out


def test_an_unknown_class_gets_the_list_of_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no such class"]) == 2
    assert "eval() in a hook" in capsys.readouterr().out
