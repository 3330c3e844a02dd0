"""The trainer's methods for callbacks: they suffice for all built-in callbacks; a call at a wrong time is an error."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, weights
from tests.helpers.processes import run_world
from tests.helpers.user_callbacks import (
    PAIRS,
    FrozenStart,
    Norms,
    behaviour_of,
    calls_over_processes,
    more_data,
    user_callbacks,
)
from trainstack.trainer import AbstractTrainer


def trainer_of(
    directory: Path, module: ts.ModuleInterface | None = None, *callbacks: Any, **changes: Any
) -> ts.Trainer:
    return ts.Trainer(module or Classifier(numbers(24)), arguments(directory, **changes), callbacks=callbacks)


@pytest.mark.parametrize("name", PAIRS)
def test_a_custom_callback_has_the_effect_of_the_built_in(name: str, tmp_path: Path) -> None:
    ours, users = (behaviour_of(make(), str(tmp_path / str(n))) for n, make in enumerate(PAIRS[name]))
    without = behaviour_of(ts.Callback(), str(tmp_path / "without"))

    assert users == ours
    assert users != without


@pytest.mark.processes
def test_custom_callbacks_have_the_same_effect_on_two_ranks(tmp_path: Path) -> None:
    """The last step of an epoch has one sample, so the second rank has none."""
    first, second = run_world(2, user_callbacks, directory=str(tmp_path / "two"))

    assert set(first) == set(PAIRS)
    for name, (ours, users) in first.items():
        assert users == ours, name
        for here, there in zip(first[name], second[name], strict=True):
            assert here["trained"] == there["trained"], name
            assert here["at_end"] == there["at_end"], name
        alone = behaviour_of(PAIRS[name][1](), str(tmp_path / name))
        torch.testing.assert_close(torch.tensor(users["trained"]), torch.tensor(alone["trained"]), rtol=1e-4, atol=1e-5)


# --- reading -----------------------------------------------------------------------------------------------


def test_the_trainer_exposes_the_live_optimizers_and_schedulers(tmp_path: Path) -> None:
    class Two(Classifier):
        def get_optimizers_schedulers(self, steps: int, epochs: int) -> tuple[Any, Any]:
            self.made = [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.Adam(self.net[3].parameters())]
            self.schedules = [torch.optim.lr_scheduler.StepLR(one, 1) for one in self.made]
            return self.made, [self.schedules[0], ts.SchedulerConfig(self.schedules[1], interval="epoch")]

    trainer = trainer_of(tmp_path, Two(numbers(24)))
    for given, made in ((trainer.optimizers, "made"), (trainer.schedulers, "schedules")):
        assert isinstance(given, tuple)
        assert all(one is other for one, other in zip(given, getattr(trainer.module, made), strict=True))


@pytest.mark.parametrize(("changes", "computed"), [({}, 3), ({"max_steps": 5}, 3), ({"max_steps": 4}, 2)])
def test_next_log_step_is_the_step_of_the_next_log(changes: Any, computed: int, tmp_path: Path) -> None:
    norms, told, logged = Norms(), list[int](), list[int]()
    trainer = trainer_of(tmp_path, None, norms, epochs=2, log_every=2, **changes)
    trainer.on(ts.Event.BEFORE_OPTIMIZER_STEP)(lambda trainer: told.append(trainer.next_log_step))
    trainer.on(ts.Event.LOG)(lambda trainer, step: logged.append(step))
    trainer.train()

    assert norms.computed == len(logged) == computed
    assert sorted(set(told)) == logged


def test_an_extra_validation_keeps_outputs_only_on_request(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Classifier(numbers(24), validate=True))

    assert set(trainer.validate(more_data())) == {"shifted"}
    lean = trainer.validate(more_data(), keep_outputs=False)
    assert not lean
    assert lean.metrics == {
        "val/shifted/loss": pytest.approx(trainer.validate(more_data()).metrics["val/shifted/loss"])
    }


# --- a call at a step --------------------------------------------------------------------------------------


def test_call_at_step_runs_between_log_point_and_validation(tmp_path: Path) -> None:
    came = list[tuple[str, int]]()

    class Calls(ts.Callback):
        def on_train_begin(self, trainer: AbstractTrainer) -> None:
            for name in ("one", "two"):
                trainer.call_at_step(4, lambda trainer, name=name: came.append((name, trainer.state.global_step)))

        def on_before_optimizer_step(self, trainer: AbstractTrainer) -> None:
            if trainer.state.global_step == 4:  # a call that is registered within a step
                trainer.call_at_step(5, lambda: came.append(("late", 5)))

        def on_log(self, trainer: AbstractTrainer, step: int) -> None:
            came.append(("log", step))

        def on_validation_begin(self, trainer: AbstractTrainer) -> None:
            came.append(("validation", trainer.state.global_step))

    module = Classifier(numbers(24), validate=True)
    trainer_of(tmp_path, module, Calls(), epochs=2, log_every=4, validate_every=4).train()

    assert came == [("log", 4), ("one", 4), ("two", 4), ("validation", 4), ("late", 5)]


def test_a_call_may_save_and_stop_without_changing_bits(tmp_path: Path) -> None:
    saved = tmp_path / "saved"

    def end(trainer: ts.Trainer) -> None:
        trainer.save_checkpoint(path=saved)
        raise ts.StopTraining

    whole, cut = Classifier(numbers(24), dropout=0.2), Classifier(numbers(24), dropout=0.2)
    torch.manual_seed(1)
    trainer_of(tmp_path, whole, epochs=2).train()
    torch.manual_seed(1)
    trainer = trainer_of(tmp_path, cut, epochs=2)
    trainer.call_at_step(4, end)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.stop_reason is not None
    assert trainer.stop_reason.endswith("end raised StopTraining")

    trainer_of(tmp_path, cut, epochs=2, resume=str(saved)).train()
    assert torch.equal(weights(whole), weights(cut))


def test_an_error_in_a_call_names_the_function(tmp_path: Path) -> None:
    def breaks(trainer: ts.Trainer) -> None:
        raise ArithmeticError("broken")

    trainer = trainer_of(tmp_path)
    trainer.call_at_step(2, breaks)
    with pytest.raises(ArithmeticError) as caught:
        trainer.train()
    assert any("breaks, called at global step 2" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("step", "function", "message"),
    [
        (2, print, "2 global steps are finished"),
        (1.5, print, "a whole number"),
        (True, print, "a whole number"),
        (9, lambda trainer, step: None, r"cannot take the arguments of call_at_step\(9"),
    ],
)
def test_a_call_at_an_impossible_step_is_refused(step: Any, function: Any, message: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.train()
    with pytest.raises(ts.ConfigurationError, match=message):
        trainer.call_at_step(step, function)


@pytest.mark.processes
def test_calls_over_processes_validate_and_save(tmp_path: Path) -> None:
    first, second = run_world(2, calls_over_processes, directory=str(tmp_path))

    assert first["called"] == second["called"] == [3, 5]
    assert first["measured"] == second["measured"]
    assert (tmp_path / "asked" / "MANIFEST.json").exists()


# --- freezing ----------------------------------------------------------------------------------------------


def test_momentum_and_weight_decay_do_not_move_frozen_parameters(tmp_path: Path) -> None:
    """Parameters are frozen after step 2 and unfrozen after step 4. A repeated call has no effect."""
    module = Classifier(numbers(64), optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.1))
    seen = [module.net[0].weight.detach().clone()]
    trainer = trainer_of(tmp_path, module)

    @trainer.on(ts.Event.TRAIN_STEP_END)
    def freeze(trainer: ts.Trainer, step: int) -> None:
        seen.append(module.net[0].weight.detach().clone())
        for _ in range(2):
            if step == 2:
                trainer.freeze(module.net[0].parameters())
            elif step == 4:
                trainer.unfreeze(module.net[0].parameters())

    trainer.train()
    moved = [not torch.equal(before, after) for before, after in pairwise(seen)]
    assert moved == [True, True, False, False, True, True, True, True]
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_before_backward", "on_after_backward"])
@pytest.mark.parametrize("call", ["freeze", "unfreeze"])
def test_freezing_within_a_step_is_refused_without_damage(hook: str, call: str, tmp_path: Path) -> None:
    module = Classifier(numbers(24))

    def in_the_step(trainer: ts.Trainer) -> None:
        if broken.pop("once", False):
            getattr(trainer, call)(module.net[0].parameters())

    broken = {"once": True}
    callback = type("Wrong", (ts.Callback,), {hook: lambda self, trainer: in_the_step(trainer)})
    trainer = trainer_of(tmp_path, module, callback, FrozenStart)
    with pytest.raises(ts.ConfigurationError, match=f"trainer.{call} was called in the middle of global step 1"):
        trainer.train()

    before = module.net[0].weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 3
    assert torch.equal(before, module.net[0].weight)


def test_invalid_arguments_of_freeze_are_refused(tmp_path: Path) -> None:
    module = Classifier(numbers(24))
    module.net[3].bias.requires_grad_(False)
    trainer = trainer_of(tmp_path, module)

    with pytest.raises(ts.ConfigurationError, match="freeze was given a str"):
        trainer.freeze(["net.0"])  # type: ignore[list-item]
    trainer.freeze(module.net[3].parameters())
    assert [p.requires_grad for p in module.net[3].parameters()] == [False, False]
    trainer.unfreeze(module.net[3].parameters())
    assert [p.requires_grad for p in module.net[3].parameters()] == [True, True], (
        "also parameters that the module had frozen"
    )

    private = trainer_of(tmp_path, Classifier(numbers(24)), backend="sp-dp")
    with pytest.raises(ts.ConfigurationError, match="private run"):
        private.freeze(private.module.parameters())


def test_freezing_when_ready_survives_a_resume(tmp_path: Path) -> None:
    class Frozen(ts.Callback):
        def on_ready(self, trainer: AbstractTrainer) -> None:
            trainer.freeze(trainer.module.get_submodule("net.0").parameters())

    saving = ts.DefaultCheckpointerArguments()
    ends = []
    for name, stops in (("whole", [None]), ("cut", [1, None])):
        for stop in stops:
            module = Classifier(numbers(24), optimizer=torch.optim.AdamW)
            trainer = trainer_of(tmp_path / name, module, Frozen, epochs=2, resume="auto", checkpointer_args=saving)
            if stop is not None:
                trainer.call_at_step(stop, lambda trainer: trainer.request_stop("cut"))
            trainer.train()
        ends.append(weights(module))
    assert torch.equal(*ends)
    assert torch.equal(module.net[0].weight, Classifier().net[0].weight)


# --- the wrong time ----------------------------------------------------------------------------------------

TOO_EARLY = {
    "optimizers": lambda trainer: trainer.optimizers,
    "schedulers": lambda trainer: trainer.schedulers,
    "next_log_step": lambda trainer: trainer.next_log_step,
    "call_at_step": lambda trainer: trainer.call_at_step(1, print),
    "freeze": lambda trainer: trainer.freeze([]),
    "unfreeze": lambda trainer: trainer.unfreeze([]),
    "load_export": lambda trainer: trainer.load_export("best"),
}


@pytest.mark.parametrize("name", TOO_EARLY)
def test_access_before_the_value_exists_is_refused_by_name(name: str, tmp_path: Path) -> None:
    class Early(ts.Callback):
        def on_init(self, trainer: AbstractTrainer) -> None:
            TOO_EARLY[name](trainer)

    class InTheModule(Classifier):
        def get_optimizers_schedulers(self, steps: int, epochs: int) -> tuple[Any, Any]:
            TOO_EARLY[name](trainer)
            return super().get_optimizers_schedulers(steps, epochs)

    with pytest.raises(ts.ConfigurationError, match=rf"trainer\.{name} was used before"):
        trainer_of(tmp_path, None, Early)
    trainer = trainer_of(tmp_path, InTheModule(numbers(24)))
    with pytest.raises(ts.ConfigurationError, match=rf"trainer\.{name} was used before"):
        trainer.train()


def test_limits_are_refused_after_the_plan_was_made(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_train_steps_per_epoch=2)
    trainer.limit_steps_per_epoch(train=5, val=3)
    assert (trainer.args.max_train_steps_per_epoch, trainer.args.max_val_steps_per_epoch) == (2, 3)
    with pytest.raises(ts.ConfigurationError, match="max_val_steps_per_epoch=0"):
        trainer.limit_steps_per_epoch(val=0)
    trainer.train()
    with pytest.raises(ts.ConfigurationError, match="after the plan was made"):
        trainer.limit_steps_per_epoch(train=1)


def test_keep_trained_weights_is_allowed_after_training_only(tmp_path: Path) -> None:
    class Wrong(ts.Callback):
        def on_epoch_end(self, trainer: AbstractTrainer) -> None:
            trainer.keep_trained_weights()

    with pytest.raises(ts.ConfigurationError, match="keep_trained_weights was called during training"):
        trainer_of(tmp_path, None, Wrong).train()

    module = Classifier(numbers(24))
    trainer = trainer_of(tmp_path, module)
    trainer.train()
    trained = weights(module)
    trainer.keep_trained_weights()
    assert trainer.keeps_trained_weights
    nn.init.zeros_(module.net[0].weight)
    trainer.train(epochs=2)
    continued = weights(module)

    other = Classifier(numbers(24))
    again = trainer_of(tmp_path / "again", other)
    again.train()
    assert torch.equal(weights(other), trained)
    again.train(epochs=2)
    assert torch.equal(weights(other), continued)


def test_an_export_that_does_not_exist_is_not_loaded(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    before = weights(trainer.module)
    with pytest.raises(ts.CheckpointError, match="missing"):
        trainer.load_export(tmp_path / "missing")
    assert torch.equal(before, weights(trainer.module))
