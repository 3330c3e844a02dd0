"""The warm-up schedules follow their closed formulas, are plain torch schedulers, and refuse invalid arguments."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as lrs

import trainstack as ts
from tests.helpers.modules import Classifier, train
from trainstack import schedulers

PEAK = 0.1


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)


def multiples(make: Callable[[Any], Any], updates: int) -> list[float]:
    """The learning rate of each update, as a multiple of the peak."""
    sgd = optimizer()
    scheduler, found = make(sgd), []
    for _ in range(updates):
        found.append(sgd.param_groups[0]["lr"] / PEAK)
        sgd.step()
        scheduler.step()
    return found


RATIOS = st.floats(0.0, 1.0)


@st.composite
def lengths(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(st.integers(1, 40))
    up = draw(st.integers(0, total))
    return total, up, draw(st.integers(0, total - up))


@pytest.mark.spec("PA-17", "F213")
@given(sizes=lengths(), start=RATIOS, final=RATIOS)
def test_cosine_and_linear_follow_their_formulas(sizes: tuple[int, int, int], start: float, final: float) -> None:
    total, up, _ = sizes
    options: dict[str, Any] = {"warmup": up, "start_ratio": start, "final_ratio": final}
    cosine = multiples(lambda o: schedulers.warmup_cosine(o, total, **options), total + 3)
    linear = multiples(lambda o: schedulers.warmup_linear(o, total, **options), total + 3)

    for step in range(total + 3):
        if step < up:
            assert cosine[step] == linear[step] == pytest.approx(start + (1 - start) * step / up)
        elif step < total:
            done = (step - up) / (total - up)
            assert cosine[step] == pytest.approx(final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)
            assert linear[step] == pytest.approx(1 + (final - 1) * done)
        elif step > up:
            assert cosine[step] == linear[step] == pytest.approx(final)


@pytest.mark.spec("PA-17", "F213")
@given(sizes=lengths(), start=RATIOS, final=RATIOS, shape=st.sampled_from(["linear", "cosine", "sqrt"]))
def test_warmup_stable_decay_stays_at_the_peak_in_between(
    sizes: tuple[int, int, int], start: float, final: float, shape: Any
) -> None:
    total, up, down = sizes
    fall = {"linear": lambda x: 1 - x, "cosine": lambda x: math.cos(math.pi * x / 2) ** 2, "sqrt": lambda x: 1 - x**0.5}
    found = multiples(
        lambda o: schedulers.warmup_stable_decay(
            o, total, warmup=up, decay=down, start_ratio=start, final_ratio=final, shape=shape
        ),
        total + 3,
    )

    for step in range(total + 3):
        if step < up:
            expected = start + (1 - start) * step / up
        elif step <= total - down:
            expected = 1.0
        else:
            done = min(1.0, (step - total + down) / max(1, down))
            expected = final + (1 - final) * fall[shape](done)
        assert found[step] == pytest.approx(expected)


@pytest.mark.spec("PA-17")
@given(up=st.integers(1, 20), start=RATIOS)
def test_inverse_sqrt_falls_with_the_root_of_the_step(up: int, start: float) -> None:
    found = multiples(lambda o: schedulers.inverse_sqrt(o, warmup=up, start_ratio=start), 50)

    assert found[:up] == pytest.approx([start + (1 - start) * step / up for step in range(up)])
    assert found[up:] == pytest.approx([(up / step) ** 0.5 for step in range(up, 50)])


@pytest.mark.spec("PA-17")
def test_a_float_is_a_fraction_of_all_steps() -> None:
    by_fraction = multiples(lambda o: schedulers.warmup_stable_decay(o, 40, warmup=0.1, decay=0.2), 40)
    by_steps = multiples(lambda o: schedulers.warmup_stable_decay(o, 40, warmup=4, decay=8), 40)

    assert by_fraction == by_steps
    assert by_steps[3] < by_steps[4] == by_steps[32] == 1.0 > by_steps[33]


@pytest.mark.spec("PA-17")
def test_every_parameter_group_keeps_its_own_peak() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.3)]
    sgd = torch.optim.SGD(groups)
    scheduler = schedulers.warmup_linear(sgd, 10, warmup=2)
    sgd.step(), scheduler.step()

    assert [group["lr"] for group in sgd.param_groups] == pytest.approx([0.05, 0.15])


MADE: dict[str, Callable[[Any], Any]] = {
    "cosine": functools.partial(schedulers.warmup_cosine, total_steps=20, warmup=0.2),
    "linear": functools.partial(schedulers.warmup_linear, total_steps=20, warmup=3),
    "wsd": functools.partial(schedulers.warmup_stable_decay, total_steps=20, warmup=3, shape="sqrt"),
    "inverse_sqrt": functools.partial(schedulers.inverse_sqrt, warmup=5),
}


@pytest.mark.spec("PA-17", "F213")
@pytest.mark.parametrize("kind", MADE)
def test_a_schedule_is_a_torch_scheduler_with_state(kind: str) -> None:
    unbroken = multiples(MADE[kind], 20)
    sgd = optimizer()
    scheduler = MADE[kind](sgd)
    for _ in range(7):
        sgd.step(), scheduler.step()
    again = optimizer()
    resumed = MADE[kind](again)
    again.load_state_dict(sgd.state_dict())
    resumed.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    rates = []
    for _ in range(13):
        rates.append(again.param_groups[0]["lr"] / PEAK)
        again.step(), resumed.step()

    assert isinstance(scheduler, lrs.LRScheduler)
    assert rates == unbroken[7:]
    assert pickle.loads(pickle.dumps(scheduler)).get_last_lr() == scheduler.get_last_lr()


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no total": (lambda o: schedulers.warmup_cosine(o, None), "total_steps=None: write a whole number.*length of an"),
    "a fraction for the total": (lambda o: schedulers.warmup_cosine(o, 0.5), r"total_steps=0\.5: write a whole number"),
    "text for the total": (lambda o: schedulers.warmup_cosine(o, "9"), "total_steps='9': write a whole number"),
    "too long a warm-up": (
        lambda o: schedulers.warmup_linear(o, 10, warmup=11),
        "warmup=11: .*from 0 to total_steps=10",
    ),
    "all of it as a fraction": (lambda o: schedulers.warmup_linear(o, 10, warmup=1.0), r"warmup=1\.0: .*below 1\.0"),
    "negative": (lambda o: schedulers.warmup_linear(o, 10, warmup=-1), "warmup=-1: write a whole number of steps"),
    "overlap": (
        lambda o: schedulers.warmup_stable_decay(o, 10, warmup=6, decay=0.5),
        r"warmup=6 \(6 steps\) and decay=0.5 \(5 steps\) do not fit into total_steps=10",
    ),
    "a ratio above the peak": (
        lambda o: schedulers.warmup_cosine(o, 10, final_ratio=1.5),
        r"final_ratio=1\.5: .*0\.0 to 1",
    ),
    "a ratio that is nan": (lambda o: schedulers.warmup_cosine(o, 10, start_ratio=math.nan), "start_ratio=nan"),
    "an unknown shape": (lambda o: schedulers.warmup_stable_decay(o, 10, shape="cubic"), "shape='cubic': write one of"),
    "no warm-up to scale by": (
        lambda o: schedulers.inverse_sqrt(o, warmup=0),
        "warmup=0: write a whole number of steps",
    ),
    "unresolved": (
        lambda o: schedulers.warmup_cosine(o, ts.placeholders.TOTAL_STEPS),
        "TOTAL_STEPS has no value before the run's plan",
    ),
    "an option of transformers": (
        lambda o: schedulers.build_scheduler("warmup_cosine", warmup_steps=4)(o),
        "the scheduler 'warmup_cosine' has no option 'warmup_steps'. Write warmup.",
    ),
    "an unknown option": (
        lambda o: schedulers.build_scheduler("StepLR", steps=4)(o),
        "the scheduler 'StepLR' has no option 'steps'. The options are step_size,",
    ),
    "an unknown name": (lambda o: schedulers.build_scheduler("warmup_cosin")(o), "Did you mean 'warmup_cosine'"),
    "nothing like a name": (lambda o: schedulers.build_scheduler("xx")(o), "there is no scheduler 'xx'. There are"),
}


@pytest.mark.spec("PA-17", "HZ-11")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_impossible_schedules_are_refused(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ts.ConfigurationError, match=message):
        make(optimizer())


class Named(Classifier):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.chosen, self.rates = ts.build_scheduler(name, **options), list[float]()

    def get_optimizers_schedulers(self, *_: Any) -> Any:
        self.made = torch.optim.SGD(self.parameters(), lr=PEAK)
        return [self.made], [self.chosen]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.rates.append(self.made.param_groups[0]["lr"] / PEAK)
        return super().train_step(global_step, batch, device)


@pytest.mark.spec("HZ-11", "PA-10", "PA-17")
def test_a_named_schedule_spans_the_whole_run(tmp_path: Path) -> None:
    module = Named("warmup_linear", warmup=0.25, final_ratio=0.5)
    train(module, tmp_path, epochs=2)

    assert module.rates == pytest.approx([0, 1 / 3, 2 / 3] + [1 - 0.5 * step / 9 for step in range(9)])


@pytest.mark.spec("HZ-11", "PA-15")
def test_torchs_schedulers_are_built_by_class_name(tmp_path: Path) -> None:
    module = Named("StepLR", step_size=ts.placeholders.STEPS_PER_EPOCH, gamma=0.5)
    train(module, tmp_path, epochs=2)

    assert module.rates == [1.0] * 6 + [0.5] * 6


def test_by_step_sets_each_rate_as_the_function_gives_it() -> None:
    rates = [0.3, 1 / 3, 0.1 + 1e-17, 0.7, 0.9]
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.7)]
    sgd = torch.optim.SGD(groups)
    scheduler, found = schedulers.by_step(sgd, rates.__getitem__), []
    for _ in rates[1:]:
        found.append([group["lr"] for group in sgd.param_groups])
        sgd.step()
        scheduler.step()
    assert found == [[rate, rate] for rate in rates[:-1]]

    again = schedulers.by_step(torch.optim.SGD(groups), rates.__getitem__)
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert again.get_last_lr() == [0.9, 0.9]
    assert again.last_epoch == 4


def test_a_resumed_run_continues_by_step(tmp_path: Path) -> None:
    class Falling(Classifier):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):  # type: ignore[no-untyped-def]
            sgd = torch.optim.SGD(self.parameters(), lr=1.0)
            return sgd, schedulers.by_step(sgd, lambda step: 0.3 / (step + 1))

    def weights(epochs: list[int], folder: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        for number, count in enumerate(epochs):
            module = Falling()
            keep = ts.DefaultCheckpointerArguments()
            train(module, tmp_path / folder, epochs=count, resume=number > 0, checkpointer_args=keep)
        return [tensor.clone() for tensor in module.state_dict().values()]

    whole, resumed = weights([2], "whole"), weights([1, 2], "resumed")
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
