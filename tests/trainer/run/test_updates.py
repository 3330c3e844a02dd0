"""Steps of several updates: a `train_step` that yields, and optimizers that evaluate a closure."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.modules import arguments, train, weights
from tests.helpers.processes import run_world
from tests.helpers.workers import updates
from tests.helpers.workers.updates import POINTS, InTurns, Points, Regression, fooling_loss, judge_loss, lbfgs, networks

PLAIN = {"epochs": 2, "train_batch_size": 8, "clip_grads": False}


def in_turns_by_hand(rounds: int = 1, limit: float | None = None) -> Tensor:
    """The weights after the steps of `InTurns`, in a plain loop."""
    generator, judge = networks()
    first, second = torch.optim.Adam(judge.parameters(), lr=0.02), torch.optim.Adam(generator.parameters(), lr=0.01)
    losses = [(judge_loss, first, judge)] * rounds + [(fooling_loss, second, generator)]
    for _ in range(2):
        for real in POINTS.split(8):
            for loss, optimizer, moved in losses:
                generator.zero_grad(), judge.zero_grad()
                loss(generator, judge, real).backward()
                if limit is not None:
                    nn.utils.clip_grad_norm_(moved.parameters(), limit)
                optimizer.step()
    return torch.cat([weights(generator), weights(judge)])


def closure_of(generator: nn.Module, optimizer: torch.optim.Optimizer, points: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = ((generator(points) - points.sin()) ** 2).mean()
        loss.backward()
        return loss

    return closure


def lbfgs_by_hand() -> Tensor:
    generator, _ = networks()
    optimizer = lbfgs(generator.parameters())
    for _ in range(2):
        for points in POINTS.split(8):
            optimizer.step(closure_of(generator, optimizer, points))
    return weights(generator)


@pytest.mark.parametrize("rounds", [1, 3])
def test_networks_are_trained_in_turns(rounds: int, tmp_path: Path) -> None:
    module = InTurns(rounds)
    trainer = train(module, tmp_path, **PLAIN)
    assert torch.equal(weights(module), in_turns_by_hand(rounds))
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("limit", [3, 1])
def test_each_update_has_the_gradient_of_the_whole_step(limit: int, tmp_path: Path) -> None:
    module = InTurns(2)
    train(module, tmp_path, gpu_batch_size_limit=limit, **PLAIN)
    torch.testing.assert_close(weights(module), in_turns_by_hand(2), rtol=0, atol=1e-12)


def test_each_update_is_clipped_over_its_own_parameters(tmp_path: Path) -> None:
    module = InTurns()
    train(module, tmp_path, epochs=2, train_batch_size=8, max_grad_norm=0.05)
    torch.testing.assert_close(weights(module), in_turns_by_hand(limit=0.05), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["rounds", "lbfgs", "polyak"])
@pytest.mark.distributed
def test_ranks_make_the_updates_of_one_process(kind: str) -> None:
    alone = torch.tensor(updates.trained(kind))
    for found in run_world(2, updates.trained, kind=kind, backend="ddp", gpu_batch_size_limit=3):
        torch.testing.assert_close(torch.tensor(found), alone, rtol=0, atol=1e-10)


@pytest.mark.distributed
def test_ranks_that_yield_different_updates_are_refused() -> None:
    for said in run_world(2, updates.different_updates):
        assert re.search(r"global step 1 yielded different updates: optimizers 0 and optimizers 1", said)


@pytest.mark.parametrize("backend", ["sp-bf16", "sp-amp"])
def test_half_precision_trains_in_turns(backend: str, tmp_path: Path) -> None:
    module = InTurns(2)
    trainer = train(module, tmp_path, backend=backend, **PLAIN)
    assert trainer.state.skipped_steps == 0
    assert (weights(module) - in_turns_by_hand(2)).abs().max() < 0.05


# --- closures


@pytest.mark.parametrize("yields", [False, True])
def test_lbfgs_is_stepped_with_a_closure(yields: bool, tmp_path: Path) -> None:
    module = Regression(lbfgs, yields=yields)
    train(module, tmp_path, **PLAIN)
    assert torch.equal(weights(module.generator), lbfgs_by_hand())


def test_a_closure_evaluates_all_micro_batches(tmp_path: Path) -> None:
    module = Regression(lbfgs)
    train(module, tmp_path, gpu_batch_size_limit=3, **PLAIN)
    torch.testing.assert_close(weights(module.generator), lbfgs_by_hand(), rtol=0, atol=1e-10)


class Sam(torch.optim.SGD):
    """Sharpness-aware minimization: steps with the gradient at perturbed weights (Foret et al. 2021)."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        (group,) = self.param_groups
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        with torch.no_grad():
            before = [p.clone() for p in group["params"]]
            for p in group["params"]:
                p += 0.05 * p.grad / norm
        closure()
        with torch.no_grad():
            for p, value in zip(group["params"], before, strict=True):
                p.copy_(value)
        super().step()


def test_an_optimizer_takes_two_passes_of_one_batch(tmp_path: Path) -> None:
    module = Regression(lambda parameters: Sam(parameters, lr=0.1), yields=True)
    trainer = train(module, tmp_path, log_every=1, **PLAIN)
    generator, _ = networks()
    optimizer, losses = Sam(generator.parameters(), lr=0.1), []
    for _ in range(2):
        for points in POINTS.split(8):
            closure = closure_of(generator, optimizer, points)
            losses.append(closure().item())
            optimizer.step(closure)
    assert torch.equal(weights(module.generator), weights(generator))
    assert trainer.history.get_metric_values("train/loss") == pytest.approx(losses)


# --- records and calls of a step of several updates


class Told(InTurns):
    """Records the calls of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        first = judge_loss(self.generator, self.judge, batch[0])
        yield first, self.trained_by[0]
        yield fooling_loss(self.generator, self.judge, batch[0]), self.trained_by[1]
        return {"loss": first, "rows": batch[0], "optimizer": 1}

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        self.trained_by, schedulers = super().get_optimizers_schedulers(*given)
        return self.trained_by, schedulers

    def on_end_backward(self, global_step: int, loss_tensor: Tensor) -> None:
        self.calls.append(("backward", global_step, loss_tensor.item()))

    def on_end_train_step(self, global_step: int, outputs: Any) -> None:
        self.calls.append(("step", global_step, len(outputs["rows"])))


def test_hooks_are_called_for_each_pass_and_once_a_step(tmp_path: Path) -> None:
    module = Told()
    trainer = train(module, tmp_path, gpu_batch_size_limit=4, max_steps=1, log_every=1, **PLAIN)
    assert [call[:2] for call in module.calls] == [("backward", 1)] * 4 + [("step", 1)]
    assert module.calls[-1] == ("step", 1, 8)
    losses = [loss for _, _, loss in module.calls[:-1]]
    assert trainer.history.get_latest_metric("train/loss") == pytest.approx(sum(losses) / 2)


def test_events_are_fired_for_each_update(tmp_path: Path) -> None:
    fired: list[Any] = []
    trainer = ts.Trainer(InTurns(2), arguments(tmp_path, max_steps=2, gpu_batch_size_limit=4, **PLAIN))
    for event in (ts.Event.TRAIN_BATCH_BEGIN, ts.Event.BEFORE_OPTIMIZER_STEP, ts.Event.AFTER_ZERO_GRAD):
        trainer.on(event)(lambda *given, event=event: fired.append(event))
    trainer.train()
    assert fired.count(ts.Event.TRAIN_BATCH_BEGIN) == 4
    assert fired.count(ts.Event.BEFORE_OPTIMIZER_STEP) == fired.count(ts.Event.AFTER_ZERO_GRAD) == 6


def test_gradient_norms_are_joint_norms_of_all_updates(tmp_path: Path) -> None:
    trainer = ts.Trainer(
        InTurns(2), arguments(tmp_path, max_steps=1, log_every=1, **PLAIN), callbacks=[ts.callbacks.GradNormMonitor()]
    )
    trainer.train()

    generator, judge = networks()
    optimizer, norms, real = torch.optim.Adam(judge.parameters(), lr=0.02), list[Tensor](), POINTS[:8]
    for loss, network in ((judge_loss, judge), (judge_loss, judge), (fooling_loss, generator)):
        generator.zero_grad(), judge.zero_grad()
        loss(generator, judge, real).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in network.parameters() if p.grad is not None]))
        optimizer.step()
    of = trainer.history.get_latest_metric
    assert of("grad_norm/judge") == pytest.approx(float(torch.hypot(norms[0], norms[1])))
    assert of("grad_norm/generator") == pytest.approx(float(norms[2]))


def test_subscribers_get_the_batch_and_the_loss_of_each_pass(tmp_path: Path) -> None:
    trainer, given = ts.Trainer(Told(), arguments(tmp_path, max_steps=1, **PLAIN)), []
    trainer.on(ts.Event.BEFORE_BACKWARD)(lambda trainer, outputs: given.append(outputs))
    trainer.on(ts.Event.TRAIN_BATCH_END)(lambda trainer, batch, outputs, loss: given.append((batch, outputs, loss)))
    trainer.train()
    assert len(given) == 4  # two passes, with two events each
    for before, (batch, outputs, loss) in zip(given[::2], given[1::2], strict=True):
        assert torch.equal(batch[0], POINTS[:8])
        assert torch.equal(before.detach(), loss)
        assert torch.equal(outputs, loss)


def test_a_run_is_resumed_exactly(tmp_path: Path) -> None:
    saved = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=2), **PLAIN}
    whole = InTurns(2)
    train(whole, tmp_path / "whole", **saved)
    train(InTurns(2), tmp_path / "parts", **{**saved, "max_steps": 4})
    resumed = InTurns(2)
    train(resumed, tmp_path / "parts", resume="auto", **saved)
    assert torch.equal(weights(whole), weights(resumed))


def test_only_the_nonfinite_update_of_a_step_is_skipped(tmp_path: Path) -> None:
    class Breaks(InTurns):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            broken = float("nan") if global_step == 2 else 1.0
            yield judge_loss(self.generator, self.judge, batch[0]) * broken, 0
            yield fooling_loss(self.generator, self.judge, batch[0]), 1

    module = Breaks()
    trainer = train(module, tmp_path, nonfinite="skip", **PLAIN)
    generator, judge = networks()
    first, second = torch.optim.Adam(judge.parameters(), lr=0.02), torch.optim.Adam(generator.parameters(), lr=0.01)
    for step, real in enumerate(POINTS.split(8) * 2, 1):
        for loss, optimizer in ((judge_loss, first), (fooling_loss, second)):
            if (step, optimizer) != (2, first):
                generator.zero_grad(), judge.zero_grad()
                loss(generator, judge, real).backward()
                optimizer.step()

    assert [trainer.state.global_step, trainer.state.skipped_steps] == [6, 0]
    assert torch.equal(weights(module), torch.cat([weights(generator), weights(judge)]))


def test_a_step_that_fails_between_its_updates_is_not_continued(tmp_path: Path) -> None:
    class Fails(InTurns):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield judge_loss(self.generator, self.judge, batch[0]), 0
            if global_step == 2:
                raise RuntimeError("between two updates")
            yield fooling_loss(self.generator, self.judge, batch[0]), 1

    trainer = ts.Trainer(Fails(), arguments(tmp_path, **PLAIN))
    with pytest.raises(RuntimeError, match="between two updates"):
        trainer.train()
    with pytest.raises(ts.ConfigurationError, match="global step 2 has failed between two of its updates"):
        trainer.train()


# --- refusals


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        (lambda loss: (loss, 2), "yielded 2 as an optimizer.*one of the 2 that"),
        (lambda loss: (loss, "generator"), "yielded 'generator' as an optimizer"),
        (lambda loss: (loss.item(), 0), "the number .* as the loss"),
        (lambda loss: None, "in which there is no loss"),
    ],
)
def test_a_wrong_yield_is_refused_with_the_reason(yielded: Any, message: str, tmp_path: Path) -> None:
    class Wrong(Points):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield yielded(judge_loss(self.generator, self.judge, batch[0]))

    with pytest.raises(ts.ModuleContractError, match=message):
        train(Wrong(), tmp_path)


def test_micro_batches_that_end_at_different_updates_are_refused(tmp_path: Path) -> None:
    class Uneven(InTurns):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield judge_loss(self.generator, self.judge, batch[0]), 0
            if self.micro_batch.number:
                yield fooling_loss(self.generator, self.judge, batch[0]), 1

    with pytest.raises(ts.ModuleContractError, match=r"the end of train_step and optimizers 1"):
        train(Uneven(), tmp_path, gpu_batch_size_limit=4, **PLAIN)


@pytest.mark.parametrize(
    ("module", "backend", "message"),
    [
        (InTurns, "sp-dp", "'dp' supports one: the noise is accounted for one gradient a step"),
        (lambda: Regression(lbfgs), "sp-dp", "LBFGS evaluates a closure, which 'dp' cannot"),
        (lambda: Regression(Sam, yields=True), "sp-amp", "Sam evaluates a closure, which 'amp' cannot"),
        (lambda: Regression(lbfgs), "sp-amp", "LBFGS evaluates a closure, which 'amp' cannot.*bf16"),
    ],
)
def test_layers_refuse_unsupported_updates(module: Any, backend: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        train(module(), tmp_path, backend=backend)


def test_a_closure_among_other_optimizers_has_to_be_yielded(tmp_path: Path) -> None:
    class Both(Points):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return [lbfgs(self.judge.parameters()), torch.optim.SGD(self.generator.parameters(), lr=0.1)], None

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return judge_loss(self.generator, self.judge, batch[0])

    with pytest.raises(ts.ConfigurationError, match=r"other optimizers is 1.*yield compute_loss, optimizer"):
        train(Both(), tmp_path)


# --- silent errors of other libraries


def yields(make: Callable[..., Any]) -> Points:
    """A module whose `train_step` yields the result of `make` for it and its batch."""

    class Made(Points):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            yield from make(self, batch[0])

    return Made()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda loss: [loss, 0], r"yielded a list of \(Tensor, int\)"),
        (lambda loss: (loss, 0, "more"), r"yielded a tuple of \(Tensor, int, str\)"),
        (lambda loss: (loss, None), r"yielded a tuple of \(Tensor, None\)"),
        (lambda loss: (loss, ()), r"yielded a tuple of \(Tensor, tuple\)"),
        (lambda loss: {"loss": loss, "optimizer": 0}, "the key 'optimizer', which is not used"),
    ],
)
def test_a_yield_of_another_form_steps_nothing(made: Any, message: str, tmp_path: Path) -> None:
    module = yields(lambda self, points: [made(judge_loss(self.generator, self.judge, points))])
    before = weights(module).clone()
    with pytest.raises(ts.ModuleContractError, match=f"{message}.*Write `yield loss, optimizer`"):
        train(module, tmp_path)
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("block", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad])
def test_a_mode_does_not_last_through_a_yield(block: Any, tmp_path: Path) -> None:
    def make(self: Points, points: Tensor) -> Any:
        loss = judge_loss(self.generator, self.judge, points)
        with block():
            yield loss, 0

    with pytest.raises(ts.ModuleContractError, match=r"yields within a `with` block.*End the block before"):
        train(yields(make), tmp_path, gpu_batch_size_limit=3, **PLAIN)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def square_of_generator(self: Points, points: Tensor) -> Any:
    yield (self.generator(points) ** 2).mean(), 0  # the first optimizer is the discriminator's
    yield fooling_loss(self.generator, self.judge, points), 1


def backward_by_hand(self: Points, points: Tensor) -> Any:
    loss = judge_loss(self.generator, self.judge, points)
    loss.backward(retain_graph=True)
    yield loss, 0
    yield fooling_loss(self.generator, self.judge, points), 1


def sum_of_points(self: Points, points: Tensor) -> Any:
    yield (self.judge(points) ** 2).sum(), 0
    yield fooling_loss(self.generator, self.judge, points), 1


def nothing(self: Points, points: Tensor) -> Any:
    yield from ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (square_of_generator, r"4 trainable parameters received no gradient in the first step: judge\.0\.weight"),
        (backward_by_hand, r"called backward\(\) itself in global step 1"),
        (sum_of_points, r"seems to return a sum over samples"),
        (nothing, r"has not yielded optimizers 0 \(Adam\), 1 \(Adam\) by global step 1"),
        (
            lambda self, points: [(judge_loss(self.generator, self.judge, points), 0)],
            r"has not yielded optimizer 1 \(Adam\) by global step 3, so no update has changed its parameters",
        ),
    ],
)
def test_a_probable_mistake_causes_one_warning(
    make: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(yields(make), tmp_path, gpu_batch_size_limit=4, **PLAIN)
    assert len([record for record in caplog.records if re.search(message, record.getMessage())]) == 1


@pytest.mark.parametrize(
    "module", [InTurns, lambda: InTurns(3), lambda: Regression(lbfgs), lambda: Regression(Sam, yields=True)]
)
def test_correct_updates_cause_no_warning(module: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(module(), tmp_path, gpu_batch_size_limit=4, **PLAIN)
    said = [record.getMessage() for record in caplog.records]
    assert not [one for one in said if re.search(r"itself in global|no gradient|has not yielded|sum over", one)]


@pytest.mark.parametrize("yields_it", [False, True])
def test_a_closure_is_refused_with_nonfinite_skip(yields_it: bool, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=r"nonfinite='skip' with LBFGS.*Write nonfinite='raise'"):
        train(Regression(lbfgs, yields=yields_it), tmp_path, nonfinite="skip", **PLAIN)


def test_a_step_that_returns_a_generator_is_refused(tmp_path: Path) -> None:
    class Returns(Points):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return square_of_generator(self, batch[0])

    with pytest.raises(ts.ModuleContractError, match=r"returned a generator without being a .*yield from"):
        train(Returns(), tmp_path)


@pytest.mark.parametrize("yields", [True, False])
def test_a_step_given_to_the_trainer_decides_whether_it_yields(yields: bool, tmp_path: Path) -> None:
    class Other(InTurns):
        train_step = InTurns.train_step if not yields else lambda self, global_step, batch, device: None  # type: ignore[assignment]

    def in_turns(module: Any, global_step: int, batch: Any, device: Any) -> Any:
        return (yield from InTurns.train_step(module, global_step, batch, device))

    def at_once(module: Any, global_step: int, batch: Any, device: Any) -> Any:
        return judge_loss(module.generator, module.judge, batch[0])

    class AtOnce(InTurns):
        train_step = at_once

    given, methods = Other(), (InTurns if yields else AtOnce)()
    args = arguments(tmp_path / "given", gpu_batch_size_limit=3, **PLAIN)
    ts.Trainer(given, args, train_step=in_turns if yields else at_once).train()
    train(methods, tmp_path / "methods", gpu_batch_size_limit=3, **PLAIN)
    assert torch.equal(weights(given), weights(methods))


def test_a_resume_after_the_last_step_causes_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    for resume in (False, True):
        given = arguments(tmp_path, resume=resume, checkpointer_args=saving, train_batch_size=8, clip_grads=False)
        trainer = ts.Trainer(InTurns(), given)
        if not resume:
            trainer.on(ts.Event.TRAIN_STEP_END)(lambda t, step: step == t.plan.total_steps and t.request_stop("cut"))
        trainer.train()
        trainer.close()
    assert "has not yielded" not in caplog.text
