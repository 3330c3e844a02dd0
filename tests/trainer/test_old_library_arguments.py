"""Arguments and calls of pytorch-accelerated, Hezar and fastNLP: they work, or the error names the correction."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from tests.helpers.processes import run_world
from trainstack import callbacks, placeholders


def supervised(model: nn.Module | None = None, **more: Any) -> ts.SupervisedModule:
    torch.manual_seed(0)
    given = {"train_dataset": numbers(12), "val_dataset": numbers(12), **more}
    return ts.SupervisedModule(model or nn.Linear(6, 3), nn.CrossEntropyLoss(), "sgd", **given)


class Rare(torch.utils.data.Dataset[Any]):
    """90 samples of class 0 and 10 of class 1."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return torch.ones(6), int(index % 10 == 0)


class Counts(ts.SupervisedModule):
    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), *batch[1].tolist()]
        return super().train_step(global_step, batch, device)


def balanced(directory: str, **changes: Any) -> tuple[Counts, ts.Trainer]:
    weights = [1.0 if index % 10 else 9.0 for index in range(100)]
    torch.manual_seed(0)
    module = Counts(
        nn.Linear(6, 3),
        nn.CrossEntropyLoss(),
        "sgd",
        Rare(),
        train_dataloader_kwargs={"sampler": WeightedRandomSampler(weights, 400)},
    )
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=7)}
    return module, ts.Trainer(module, arguments(directory, train_batch_size=20, **saves, **changes))


@pytest.mark.spec("PA-12")
def test_a_weighted_sampler_balances_classes_and_resumes_exactly(tmp_path: Path) -> None:
    whole, trainer = balanced(str(tmp_path / "whole"))
    trainer.train()
    assert len(whole.seen) == 400
    assert 140 < sum(whole.seen) < 260  # half of them; 40 without weights

    first, stopped = balanced(str(tmp_path / "cut"))
    stopped.on(ts.Event.TRAIN_STEP_END)(lambda trainer, step: step == 9 and trainer.request_stop("half"))
    stopped.train()
    second, resumed = balanced(str(tmp_path / "cut"), resume=True)
    resumed.train()
    assert first.seen + second.seen == whole.seen
    assert torch.equal(second.model.weight, whole.model.weight)  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match="the batch of training is an argument of the run"):
        supervised(train_dataloader_kwargs={"batch_size": 3})


@pytest.mark.spec("PA-15")
def test_loader_length_placeholders_are_refused_with_a_correction() -> None:
    for name in ("TRAIN_DATALOADER_LEN", "EVAL_DATALOADER_LEN"):
        with pytest.raises(AttributeError, match=r"several batches of a loader\. Write placeholders\.STEPS_PER_EPOCH"):
            getattr(placeholders, name)
    with pytest.raises(AttributeError, match="has no attribute 'OTHER'"):
        _ = placeholders.OTHER  # type: ignore[attr-defined]


@pytest.mark.spec("PA-23")
def test_a_trainer_loads_several_checkpoints_one_after_another(tmp_path: Path) -> None:
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments(keep_last=9)}
    trainer = train(Classifier(validate=True, scheduler=True, dropout=0.5), tmp_path, epochs=3, **saves)
    measured = {record.step: record.value for record in trainer.history.records("val/loss")}
    final = {name: value.clone() for name, value in trainer.module.state_dict().items()}
    folders = sorted((tmp_path / "checkpoints").glob("checkpoint-0*"))
    for folder in folders:
        trainer.load_checkpoint(folder)
        assert trainer.validate().metrics["val/loss"] == measured.pop(trainer.state.global_step)
    assert not measured

    with pytest.raises(ts.CheckpointError, match="does not exist"):
        trainer.load_checkpoint(tmp_path / "none")
    assert trainer.state.global_step == 18
    trainer.load_checkpoint(folders[0])
    trainer.train()
    assert trainer.state.global_step == 18
    assert all(torch.equal(final[name], value) for name, value in trainer.module.state_dict().items())
    trainer.load_checkpoint(folders[0], mode="weights")
    assert trainer.state.global_step == 0

    within: list[str] = []

    @trainer.on(ts.Event.TRAIN_BEGIN)
    def load(trainer: ts.Trainer) -> None:
        with pytest.raises(ts.ConfigurationError, match="called during training or an evaluation") as refusal:
            trainer.load_checkpoint(folders[0])
        within.append(str(refusal.value))

    trainer.train()
    assert within


@pytest.mark.spec("PA-25")
def test_print_takes_the_keywords_of_print(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trainer, file = ts.Trainer(supervised(), arguments(tmp_path)), io.StringIO()
    trainer.print("a", 1, sep="", end="!\n")
    trainer.print("b", file=file, once="node")
    assert (capsys.readouterr().out, file.getvalue()) == ("a1!\n", "b\n")


@pytest.mark.spec("PA-34")
def test_the_plan_as_a_dict_has_the_total_steps(tmp_path: Path) -> None:
    plan = ts.Trainer(supervised(), arguments(tmp_path, epochs=3)).plan
    assert plan.to_dict()["total_steps"] == plan.total_steps == 6


@pytest.mark.spec("PA-40")
def test_an_environment_variable_shortens_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSTACK_FAST_DEV_RUN", "2")
    assert train(Classifier(), tmp_path, epochs=9).state.global_step == 2
    monkeypatch.setenv("TRAINSTACK_FAST_DEV_RUN", "yes")
    with pytest.raises(ts.ConfigurationError, match="TRAINSTACK_FAST_DEV_RUN='yes': write a number"):
        train(Classifier(), tmp_path)


@pytest.mark.spec("PA-40")
def test_a_checkpoint_can_be_pinned_at_any_step(tmp_path: Path) -> None:
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments(keep_last=1)}
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, epochs=2, **saves))
    trainer.call_at_step(round(0.75 * trainer.plan.total_steps), lambda trainer: trainer.save_checkpoint(pin=True))
    trainer.train()
    assert [one.name for one in sorted((tmp_path / "checkpoints").glob("checkpoint-0*"))] == [
        "checkpoint-000000009",
        "checkpoint-000000012",
    ]


@pytest.mark.spec("HZ-05")
def test_a_hub_id_as_path_is_refused_with_a_correction(tmp_path: Path) -> None:
    args = arguments(tmp_path, init_weights_from="hezarai/bert-base-fa")
    with pytest.raises(ts.CheckpointNotFoundError, match=r"snapshot_download\('hezarai/bert-base-fa'\)"):
        ts.Trainer(supervised(), args).train()


@pytest.mark.spec("HZ-09")
def test_seed_everything_also_repeats_dropout(tmp_path: Path) -> None:
    def weights(name: str) -> torch.Tensor:
        trainer = train(Classifier(dropout=0.5), tmp_path / name, seed=5, seed_everything=True)
        return torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])

    first = weights("a")
    torch.rand(7)
    assert torch.equal(first, weights("b"))


class Right:
    """A metric in the form of allennlp: called, and read by `get_metric(reset)`."""

    def __init__(self) -> None:
        self.right, self.seen = 0, 0

    def __call__(self, outputs: Any, targets: Any) -> None:
        self.right, self.seen = self.right + int((outputs.argmax(1) == targets).sum()), self.seen + len(targets)

    def get_metric(self, reset: bool = False) -> Any:
        value = self.right / self.seen if self.seen else 0.0
        if reset:
            self.right = self.seen = 0
        return value


class RightOfFastNLP(Right):
    """A metric in the form of fastNLP."""

    update = Right.__call__

    def get_metric(self) -> Any:  # type: ignore[override]
        return {"acc": super().get_metric()}

    def reset(self) -> None:
        super().get_metric(reset=True)


def both_kinds(directory: str, backend: str = "ddp") -> dict[str, float]:
    module = supervised(metrics={"a": Right(), "f": RightOfFastNLP()})
    trainer = ts.Trainer(module, arguments(directory, backend=backend, val_batch_size=5))
    trainer.validate()
    return dict(trainer.validate().metrics)


@pytest.mark.spec("FN-13", "HZ-19")
@pytest.mark.distributed
def test_metrics_with_get_metric_work_on_all_ranks(tmp_path: Path) -> None:
    one = both_kinds(str(tmp_path), "sp")
    assert one["val/a"] == one["val/f/acc"] > 0
    assert run_world(2, both_kinds, directory=str(tmp_path)) == [pytest.approx(one)] * 2
    trainer = ts.Trainer(supervised(metrics={"a": Right()}), arguments(tmp_path, monitor="a", monitor_mode="max"))
    trainer.train()
    assert trainer.args.monitor == "val/a"
    assert ts.Trainer(supervised(), arguments(tmp_path, monitor="loss")).args.monitor == "val/loss"


@pytest.mark.spec("FN-05", "FN-26", "FN-29", "HZ-01")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "gpu:1"}, "torch calls it 'cuda:1'"),
        ({"device": "gpu"}, "torch calls it 'cuda'"),
        ({"progress": "tqdm"}, "write 'rich' for a bar"),
        ({"progress": "raw"}, "write 'plain' for lines"),
        ({"task": "text_classification"}, r"Write the metrics by name.*docs/recipes/"),
    ],
)
def test_values_of_other_libraries_are_refused_with_a_correction(changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ts.ConfigurationError, match=message):
        arguments(tmp_path, **changes)


@pytest.mark.spec("FN-11", "FN-29")
def test_train_refuses_arguments_of_the_run_and_loops(tmp_path: Path) -> None:
    trainer = ts.Trainer(supervised(), arguments(tmp_path))
    for name, message in {
        "max_train_steps_per_epoch": r"dataclasses\.replace\(trainer\.args, max_train_steps_per_epoch",
        "num_epochs": "write epochs",
        "train_dataset": "write it as the data set of the loaders that the module returns",
    }.items():
        with pytest.raises(ts.ConfigurationError, match=message):
            trainer.train(**{name: 1})  # type: ignore[arg-type]
    with pytest.raises(ts.ConfigurationError, match=r"one loop.*train_step=\.\.\..*train_dl"):
        trainer.train_batch_loop = object()  # type: ignore[attr-defined]


@pytest.mark.spec("FN-08")
def test_a_function_may_replace_the_training_step(tmp_path: Path) -> None:
    def step(module: Any, global_step: int, batch: Any, device: Any) -> Any:
        calls.append(global_step)
        return {"loss": 2.0 * nn.functional.cross_entropy(module.model(batch[0]), batch[1])}

    for backend in ("sp", "sp-amp", "sp-dp"):
        calls: list[int] = []
        trainer = ts.Trainer(supervised(), arguments(tmp_path / backend, backend=backend), train_step=step)
        trainer.train()
        assert set(calls) >= {1, 2}
    plain, doubled = supervised(), supervised()
    train(plain, tmp_path / "plain", clip_grads=False)
    ts.Trainer(doubled, arguments(tmp_path / "twice", clip_grads=False), train_step=step).train()
    start = supervised().model.weight
    moved, twice = (module.model.weight - start for module in (plain, doubled))  # type: ignore[operator]
    assert moved.norm() < twice.norm() < 2.1 * moved.norm()
    with pytest.raises(ts.ConfigurationError, match=r"def train_step\(module, global_step, batch, device\)"):
        ts.Trainer(supervised(), arguments(tmp_path), train_step=lambda batch: 1)


@pytest.mark.spec("FN-17")
def test_a_model_may_return_its_target_but_no_other(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, other: bool) -> None:
            super().__init__()
            self.net, self.other = nn.Linear(6, 3), other

        def forward(self, x: Any, target: Any) -> Any:
            return {"pred": self.net(x), "target": target.clone() if self.other else target}

    def loss(pred: Any, target: Any) -> Any:
        return nn.functional.cross_entropy(pred, target)

    data = [{"x": x, "target": y} for x, y in numbers(8)]
    train(ts.SupervisedModule(Net(other=False), loss, "sgd", data), tmp_path / "same")
    with pytest.raises(ts.ModuleContractError, match="takes 'target', and two sources have it"):
        train(ts.SupervisedModule(Net(other=True), loss, "sgd", data), tmp_path / "other")


@pytest.mark.spec("FN-10")
def test_a_model_without_forward_gets_advice_on_forward_fn(tmp_path: Path) -> None:
    class Net(nn.Linear):
        forward = nn.Module.forward  # type: ignore[assignment]

        def train_step(self, x: Any) -> Any:
            return nn.Linear.forward(self, x)

    with pytest.raises(NotImplementedError) as refusal:
        train(supervised(Net(6, 3)), tmp_path)
    assert any("SupervisedModule(forward_fn='train_step') calls those" in note for note in refusal.value.__notes__)


@pytest.mark.spec("FN-12")
def test_a_single_callback_needs_no_list(tmp_path: Path) -> None:
    for given in (callbacks.EarlyStopping(), callbacks.EarlyStopping):
        trainer = ts.Trainer(supervised(), arguments(tmp_path), callbacks=given)
        assert [type(one) for one in trainer.events.callbacks.values()] == [callbacks.EarlyStopping]


class InOwnOrder(ts.SupervisedModule):
    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        class Batches(BatchSampler):
            pass

        return DataLoader(self.train_dataset, batch_sampler=Batches(RandomSampler(self.train_dataset), 3, False))

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), batch[0].sum().item()]
        return super().train_step(global_step, batch, device)


@pytest.mark.spec("FN-21")
def test_overfit_batches_works_with_a_batch_sampler(tmp_path: Path) -> None:
    module = InOwnOrder(nn.Linear(6, 3), nn.CrossEntropyLoss(), "sgd", numbers(30), {"dev": numbers(30)})
    trainer = train(module, tmp_path, epochs=4, overfit_batches=2, monitor="val/dev/loss")
    assert len(module.seen) == 8
    assert len(set(module.seen)) == 2
    losses = [record.value for record in trainer.history.records("val/dev/loss")]
    assert losses[-1] < losses[0]


@pytest.mark.spec("FN-33")
def test_train_returns_on_ctrl_c_if_requested(tmp_path: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background processes
    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
    for on_interrupt in ("raise", "return"):
        args = arguments(tmp_path / on_interrupt, epochs=3, on_interrupt=on_interrupt, **saves)
        trainer = ts.Trainer(Classifier(), args)
        trainer.on(ts.Event.TRAIN_STEP_END, once=4)(lambda: signal.raise_signal(signal.SIGINT))
        if on_interrupt == "raise":
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
        else:
            trainer.train()
        assert (trainer.stop_reason, trainer.state.global_step) == ("Ctrl-C", 4)
        trainer.train()
        assert trainer.state.global_step == 18


@pytest.mark.spec("FN-43")
def test_weights_can_be_exported_into_a_buffer(tmp_path: Path) -> None:
    module, buffer = nn.Linear(2, 2), io.BytesIO()
    module.register_parameter("tied", module.weight)
    assert ts.export_model(module, buffer) is None
    read = load(buffer.getvalue())
    assert all(torch.equal(read[name], value) for name, value in module.state_dict().items())
    with pytest.raises(ts.ConfigurationError, match="'step' are not tensors"):
        ts.export_model({"step": 3}, io.BytesIO())
    with pytest.raises(ts.ConfigurationError, match="path of a folder, or an open binary file"):
        ts.export_model(module, 3)  # type: ignore[call-overload]


@pytest.mark.spec("FN-54")
@pytest.mark.parametrize(("kind", "saved"), [(RuntimeError, True), (ValueError, False)])
def test_a_named_exception_saves_a_checkpoint(kind: type[Exception], saved: bool, tmp_path: Path) -> None:
    def fail() -> None:
        raise kind("failed")

    saves = {"checkpointer_args": ts.DefaultCheckpointerArguments()}
    trainer = ts.Trainer(Classifier(), arguments(tmp_path, save_on_exception=(RuntimeError, OSError), **saves))
    trainer.on(ts.Event.TRAIN_STEP_END, once=2)(fail)
    with pytest.raises(kind, match="failed"):
        trainer.train()
    assert any("exception" in one.name for one in (tmp_path / "checkpoints").glob("*")) is saved
    with pytest.raises(ts.ConfigurationError, match="a tuple of exception types"):
        arguments(tmp_path, save_on_exception=("RuntimeError",))
