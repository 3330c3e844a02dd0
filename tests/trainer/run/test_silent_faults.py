"""Ways in which a trainer can be wrong without a word. Each was found by trying to break this one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import trainstack as ts
from tests.helpers.modules import Classifier, Noisy, arguments, numbers, train, weights
from tests.helpers.specs import stacks_that_run_here

every_stack = pytest.mark.parametrize("backend", stacks_that_run_here(private=False))


@every_stack
def test_clipping_and_scaling_see_the_same_parameters(backend: str, tmp_path: Path) -> None:
    """A trainable parameter in no optimizer must not enter the norm: its gradient may still be scaled."""

    class HeadOnly(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

    reference, module = HeadOnly(numbers(16)), HeadOnly(numbers(16))
    train(reference, tmp_path)
    train(module, tmp_path, backend=backend)

    begin = weights(HeadOnly(numbers(16)))
    moved, expected = ((weights(m) - begin).norm().item() for m in (module, reference))
    assert moved == pytest.approx(expected, rel=0.02)


def test_a_parameter_in_two_optimizers_is_refused(tmp_path: Path) -> None:
    class Twice(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)], []

    with pytest.raises(ts.ModuleContractError, match="4 parameters that an optimizer before it holds as well"):
        train(Twice(), tmp_path)


@pytest.mark.parametrize("kind", ["batch sampler", "subset", "range"])
def test_a_sampler_that_leaves_samples_out_is_obeyed(kind: str, tmp_path: Path) -> None:
    class Restricted(Classifier):
        def loader(self, batch_size: int) -> Any:  # type: ignore[override]
            if kind == "batch sampler":
                return DataLoader(self.dataset, batch_sampler=BatchSampler(SubsetRandomSampler(range(10)), 5, False))
            sampler: Any = SubsetRandomSampler(range(10)) if kind == "subset" else SequentialSampler(range(10))
            return DataLoader(self.dataset, batch_size=batch_size, sampler=sampler)

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return Restricted.loader(self, batch_size)

        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            return Restricted.loader(self, batch_size)

    trainer = ts.Trainer(Restricted(numbers(40)), arguments(tmp_path, train_batch_size=5, val_batch_size=5))
    trainer.train()

    assert trainer.global_steps_finished == 2
    assert trainer.validate()["default"][1].shape == (10,)


def test_a_gradient_hook_that_works_in_place_does_no_lasting_harm(tmp_path: Path) -> None:
    class Hooked(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = super().train_step(global_step, batch, device)
            loss.register_hook(lambda gradient: gradient.mul_(0.5))
            return loss

    class Halved(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            loss = super().train_step(global_step, batch, device)
            return loss * 0.5 + loss.detach() * 0.5

    hooked, halved = Hooked(), Halved()
    train(hooked, tmp_path, clip_grads=False)
    train(halved, tmp_path, clip_grads=False)

    assert (weights(hooked) - weights(halved)).abs().max() < 1e-6


def test_data_that_changes_between_epochs_is_seen(tmp_path: Path) -> None:
    class Changing(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(16))
            self.seen: list[float] = []

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.dataset.tensors = (torch.full((16, 6), float(epoch)), self.dataset.tensors[1])

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.seen.append(batch[0][0, 0].item())
            return super().train_step(global_step, batch, device)

    module = Changing()
    train(module, tmp_path, epochs=2)

    assert module.seen == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.spec("F201")
def test_a_module_that_acts_in_train_and_eval_gets_both_calls(tmp_path: Path) -> None:
    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    module = Classifier(numbers(16), validate=True)
    layer = Merging(3, 3)
    module.net.append(layer)
    merged = []
    module.on_begin_train_epoch = lambda global_step, epoch: merged.append(layer.merged)  # type: ignore[method-assign]
    train(module, tmp_path, epochs=3)

    assert merged == [False] * 3


def test_parameters_that_join_later_are_trained_like_the_others(tmp_path: Path) -> None:
    class Growing(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            self.made = torch.optim.SGD(self.net.parameters(), lr=0.1)
            return self.made

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            if epoch == 1:
                self.late = nn.Parameter(torch.zeros(3))
                self.made.add_param_group({"params": [self.late]})

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            extra = self.late.sum() * 100 if hasattr(self, "late") else 0.0
            return super().train_step(global_step, batch, device) + extra

    module = Growing(numbers(16))
    train(module, tmp_path, epochs=2)

    assert 0 < module.late.detach().norm() <= 2 * 0.1 + 1e-6, "clipped to norm 1, and not added up over steps"


def test_skipping_judges_only_what_counts(tmp_path: Path) -> None:
    """A micro-batch of weight 0 has the loss 0/0; and what is finite in float64 is finite."""

    class Padded(Classifier):
        def batch_weight(self, batch: Any) -> float:
            return float((batch[0][:, 0] > 0).sum())

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            keep = batch[0][:, 0] > 0
            return nn.functional.cross_entropy(self.net(batch[0][keep]), batch[1][keep])

    class Huge(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * 1e60

    for module in (Padded(numbers(40)), Huge(numbers(40, dtype=torch.float64), dtype=torch.float64)):
        trainer = train(module, tmp_path, nonfinite="skip", gpu_batch_size_limit=1 if type(module) is Padded else 8)
        assert trainer.state.skipped_steps == 0


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_validation_weighs_by_samples_even_where_a_batch_does_not_tell(batch_size: int, tmp_path: Path) -> None:
    class Detection(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            pictures = [(torch.zeros(3, 4, 4), index) for index in range(9)]
            return DataLoader(pictures, batch_size=batch_size, collate_fn=lambda items: tuple(zip(*items, strict=True)))

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.tensor([float(i == 8) for i in batch[1]]).mean()

    trainer = ts.Trainer(Detection(), arguments(tmp_path, val_batch_size=batch_size))
    assert trainer.validate().metrics["val/loss"] == pytest.approx(1 / 9)


def test_a_batch_that_does_not_tell_its_samples_is_refused() -> None:
    with pytest.raises(ts.ModuleContractError, match="batch_weight"):
        Classifier().batch_weight(((torch.zeros(3, 4), torch.zeros(3, 5)), (1, 2)))


@every_stack
def test_a_step_that_is_left_out_leaves_running_statistics_alone(backend: str, tmp_path: Path) -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(32))
            self.net.insert(1, nn.BatchNorm1d(8))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            inputs = batch[0] * (float("nan") if global_step == 2 else 1.0)
            return nn.functional.cross_entropy(self.net(inputs), batch[1])

    module = Normed()
    trainer = train(module, tmp_path, backend=backend, nonfinite="skip")

    assert trainer.state.skipped_steps == 1
    assert torch.isfinite(module.net[1].running_mean).all()
    assert module.net[1].num_batches_tracked == 3


def test_a_mask_of_minus_infinity_may_be_saved_and_poisoned_statistics_may_not(tmp_path: Path) -> None:
    class Masked(Classifier):
        def __init__(self, poison: bool) -> None:
            super().__init__(numbers(16))
            self.mask = nn.Parameter(torch.full((2,), -torch.inf), requires_grad=False)
            self.register_buffer("bias", torch.full((2,), -torch.inf))
            self.register_buffer("count", torch.zeros(1))
            self.poison = poison

        def get_optimizers_schedulers(self, *_: Any) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            self.count += float("nan") if self.poison else 1.0
            return super().train_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments()
    train(Masked(False), tmp_path / "fine", checkpointer_args=saving)
    with pytest.raises(ts.NonFiniteError, match="'count' holds inf or nan after global step 2"):
        train(Masked(True), tmp_path / "poisoned", checkpointer_args=saving)


SAVING_HOOKS = [
    "on_begin_train_epoch",
    "on_end_backward",
    "on_end_train_step",
    "on_end_train_epoch",
    "on_end_val_epoch",
]


@pytest.mark.parametrize("hook", SAVING_HOOKS)
def test_a_checkpoint_asked_for_in_any_hook_goes_on_exactly(hook: str, tmp_path: Path) -> None:
    class Saving(Classifier):
        trainer: Any = None
        calls = 0

        def save(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            torch.rand(2)
            if self.trainer is not None and self.calls == 2:
                self.trainer.save_checkpoint(force=True)

    made: dict[str, Any] = {"epochs": 3, "checkpointer_args": ts.DefaultCheckpointerArguments(period=100)}

    def run(directory: Path, *, saves: bool, **changes: Any) -> Any:
        module = type("M", (Saving,), {hook: Saving.save})(Noisy(24), dropout=0.3, validate=True)
        torch.manual_seed(1 if not changes else 9)
        trainer = ts.Trainer(module, arguments(directory, **made, **changes))
        module.trainer = trainer if saves else None
        trainer.train()
        return trainer

    unbroken = run(tmp_path / "unbroken", saves=False)
    run(tmp_path / "saving", saves=True)
    saved = [info for info in ts.list_checkpoints(tmp_path / "saving" / "checkpoints") if info.kind == "checkpoint"]
    asked_for = [info for info in saved if info.global_step not in (3, 9)] or saved
    resumed = run(tmp_path / "resumed", saves=False, resume=str(asked_for[0].path))

    assert asked_for[0].global_step < 9
    assert torch.equal(weights(resumed.module), weights(unbroken.module))
    assert resumed.history.to_dict() == unbroken.history.to_dict()


@pytest.mark.parametrize("kind", ["hook", "data", "weighted sampler"])
def test_what_an_epoch_draws_at_its_start_is_drawn_again_on_resume(kind: str, tmp_path: Path) -> None:
    class Draws(Classifier):
        stop_at: int | None = None

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.shift = torch.rand(1).item() if kind == "hook" else 0.0

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            data: Any = self.dataset
            if kind == "data":
                data = TensorDataset(torch.randn(24, 6), data.tensors[1])
            if kind == "weighted sampler":
                sampler = lambda ds: RandomSampler(ds, replacement=True, num_samples=24)  # noqa: E731
            return DataLoader(data, batch_size=batch_size, sampler=sampler(data))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == self.stop_at:
                raise KeyboardInterrupt
            return super().train_step(global_step, (batch[0] + self.shift, batch[1]), device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    torch.manual_seed(1)
    unbroken = train(Draws(numbers(24), dropout=0.2), tmp_path / "unbroken", epochs=2)
    cut = Draws(numbers(24), dropout=0.2)
    cut.stop_at = 5
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        train(cut, tmp_path / "cut", epochs=2, checkpointer_args=saving)
    torch.manual_seed(77)
    resumed = train(Draws(numbers(24), dropout=0.2), tmp_path / "cut", epochs=2, checkpointer_args=saving, resume=True)

    assert torch.equal(weights(resumed.module), weights(unbroken.module))


def test_killed_during_validation_a_run_can_be_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NeedsLosses(Classifier):
        fails = True

        def on_end_train_epoch(self, global_step: int, losses: Any) -> None:
            assert len(losses) == 5

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if self.fails:
                raise KeyboardInterrupt
            return super().val_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=5)
    with pytest.raises(KeyboardInterrupt):
        train(NeedsLosses(numbers(40), validate=True), tmp_path, checkpointer_args=saving)
    module = NeedsLosses(numbers(40), validate=True)
    module.fails = False
    train(module, tmp_path, checkpointer_args=saving, resume=True, epochs=2)

    assert "on_end_train_epoch is left out" in caplog.text


def test_a_resume_that_is_refused_stays_refused(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    train(Classifier(), tmp_path, checkpointer_args=saving)
    trainer = ts.Trainer(
        Classifier(optimizer=torch.optim.AdamW), arguments(tmp_path, checkpointer_args=saving, resume=True, epochs=2)
    )
    for _ in range(2):
        with pytest.raises(ts.CheckpointMismatchError):
            trainer.train()


def test_a_forced_save_is_written_even_at_the_same_step(tmp_path: Path) -> None:
    saving = ts.DefaultCheckpointerArguments()
    trainer = train(Classifier(), tmp_path, checkpointer_args=saving)
    with torch.no_grad():
        trainer.module.net[0].weight.zero_()
    trainer.save_checkpoint(force=True)
    resumed = train(Classifier(), tmp_path, checkpointer_args=saving, resume=True)

    assert not resumed.module.net[0].weight.any()


@every_stack
def test_training_goes_on_after_an_exception_between_any_two_verbs(backend: str, tmp_path: Path) -> None:
    class Outputs(Classifier):
        sizes: list[int]

        def on_end_train_step(self, global_step: int, losses: Any) -> None:
            self.sizes.append(len(losses))

    module = Outputs(numbers(32))
    module.sizes = []
    trainer = ts.Trainer(module, arguments(tmp_path, backend=backend, gpu_batch_size_limit=2))
    trainer._ready()
    for verb in ("backward", "clip", "step"):
        layer = list(trainer.trainer_backend.layers())[-1]
        original = getattr(layer, verb)

        def interrupted(*args: Any, _verb: str = verb, _layer: Any = layer) -> Any:
            delattr(_layer, _verb)
            raise KeyboardInterrupt

        if verb == "step" and backend.endswith("amp"):
            continue
        setattr(layer, verb, interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert getattr(layer, verb).__func__ is original.__func__
    trainer.train()

    assert trainer.global_steps_finished == 4
    assert module.sizes == [4] * 4


def test_a_foreign_loader_is_not_resumed_at_a_guessed_place(tmp_path: Path) -> None:
    class Listed(Classifier):
        stop_at: int | None = None

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return iter(list(DataLoader(self.dataset, batch_size=batch_size)))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            if global_step == self.stop_at:
                raise KeyboardInterrupt
            return super().train_step(global_step, batch, device)

    saving = ts.DefaultCheckpointerArguments(every_n_steps=1)
    module = Listed(numbers(40))
    module.stop_at = 3
    with pytest.raises(KeyboardInterrupt):
        train(module, tmp_path, checkpointer_args=saving)

    with pytest.raises(ts.CheckpointMismatchError, match="micro_batch was 8 and is now 2"):
        train(Listed(numbers(40)), tmp_path, checkpointer_args=saving, resume=True, gpu_batch_size_limit=2)

    checkpoint = ts.read_checkpoint(ts.list_checkpoints(tmp_path / "checkpoints")[-1].path)
    assert checkpoint.plan is not None
    checkpoint.plan |= {"world_size": 2, "global_batch": 16}
    ts.write_checkpoint(checkpoint, tmp_path / "of two", "checkpoint-000000002")
    with pytest.raises(ts.CheckpointMismatchError, match="world_size was 2 and is now 1"):
        train(Listed(numbers(40)), tmp_path, resume=tmp_path / "of two" / "checkpoint-000000002")


def test_collected_outputs_hold_what_was_returned_and_no_more() -> None:
    collector = ts.OutputCollector()
    base = torch.zeros(1000, 1000)
    buffer = np.zeros(2)
    for value in (1.0, 2.0):
        buffer[:] = value
        collector.collect((base[0, :4], buffer))

    rows, arrays = collector.all_outputs
    assert rows.shape == (8,)
    assert [array.tolist() for array in arrays] == [[1.0, 1.0], [2.0, 2.0]]
    kept = collector._root.children[0].kept  # type: ignore[union-attr, attr-defined]
    assert all(tensor.untyped_storage().nbytes() == 16 for tensor in kept)
    empty = ts.OutputCollector()
    empty.collect(((), []))
    with pytest.raises(ts.ModuleContractError, match="earlier steps returned a list here"):
        empty.collect(((), [torch.ones(1, requires_grad=True)]))


def test_a_loss_that_is_a_parameter_is_recorded_as_it_was(tmp_path: Path) -> None:
    class Bare(Classifier):
        def __init__(self) -> None:
            super().__init__(numbers(16))
            self.value = nn.Parameter(torch.tensor(2.0))

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.value

    trainer = train(Bare(), tmp_path)

    assert trainer.history.get_latest_metric("train/loss_epoch") == pytest.approx((2.0 + 1.9) / 2)


def test_settings_that_are_tensors_survive_a_resume(tmp_path: Path) -> None:
    class Tensors(Classifier):
        def get_optimizers_schedulers(self, *_: Any) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))
            made.param_groups[0]["mine"] = torch.arange(3)
            return made

    saving = ts.DefaultCheckpointerArguments()
    train(Tensors(), tmp_path, checkpointer_args=saving)
    resumed = train(Tensors(), tmp_path, checkpointer_args=saving, resume=True, epochs=2)

    assert resumed.global_steps_finished == 12


def test_the_plan_is_not_asked_of_the_trainer_while_it_makes_ready(tmp_path: Path) -> None:
    class Curious(Classifier):
        trainer: Any = None

        def get_optimizers_schedulers(self, *args: Any) -> Any:
            assert self.plan is not None
            _ = self.trainer.estimated_global_steps_per_epoch
            return super().get_optimizers_schedulers(*args)

    module = Curious()
    module.trainer = ts.Trainer(module, arguments(tmp_path))
    with pytest.raises(ts.ConfigurationError, match=r"In get_optimizers_schedulers and .* use self\.plan"):
        module.trainer.train()


def test_a_module_in_half_precision_is_refused_by_amp(tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match="'amp' with a module in float16"):
        train(Classifier().half(), tmp_path, backend="sp-amp")


def test_predicting_uses_the_loaders_own_batches(tmp_path: Path) -> None:
    class Sizes(Classifier):
        def predict_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.tensor(len(batch[0]))

    predicted = ts.Trainer(Sizes(), arguments(tmp_path)).predict(DataLoader(numbers(10), batch_size=4))

    assert predicted[0].tolist() == [4, 4, 2]


def test_nothing_is_collected_for_a_checkpoint_that_is_not_due(tmp_path: Path) -> None:
    module = Classifier()
    module.get_state = lambda: pytest.fail("asked for its state in vain")  # type: ignore[method-assign]
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=2))
    trainer.save_model_checkpoint = lambda: None  # type: ignore[method-assign]
    trainer.train()

    assert copy.copy(trainer.state.last_epoch) == 1


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("handed", None),
        ("drop_last", None),
        ("subset", None),
        ("share", "5 samples were evaluated and the data set has 10"),
        ("own drop_last", "8 samples were evaluated and the data set has 10"),
        ("twice", "20 samples were evaluated and the data set has 10"),
        ("capped", None),
        ("uncountable", None),
    ],
)
def test_an_evaluation_over_other_samples_than_the_data_set_is_told_once(
    kind: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = numbers(10)

    class Evaluates(Classifier):
        def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
            if kind in ("handed", "drop_last"):
                return DataLoader(data, batch_size=4, sampler=sampler(data), drop_last=kind == "drop_last")
            if kind == "subset":
                part = torch.utils.data.Subset(data, range(5))
                return DataLoader(part, batch_size=4, sampler=sampler(part))
            if kind in ("share", "capped"):
                return DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(5)))
            if kind == "twice":
                return DataLoader(data, batch_sampler=[list(range(10)), list(range(10))])
            if kind == "uncountable":
                return DataLoader(data, batch_sampler=[list(range(5))], collate_fn=lambda samples: object())
            return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, True))

        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return torch.zeros(1)

    trainer = ts.Trainer(Evaluates(), arguments(tmp_path, max_val_steps_per_epoch=1 if kind == "capped" else None))
    trainer.validate()
    trainer.validate()

    told = [record.message for record in caplog.records if "samples were evaluated" in record.message]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith("val loader 'default': ")
        assert said in told[0]
        assert "sampler=sampler(dataset)" in told[0]
