"""`SupervisedModule`: a model, a loss and data sets are enough."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler as lrs
from torch.utils.data import IterableDataset, TensorDataset, default_collate

import trainstack as ts
from tests.helpers.modules import CLASSES, FEATURES, arguments, numbers, train, weights
from tests.helpers.specs import every_stack
from trainstack import SchedulerConfig, SupervisedModule, placeholders
from trainstack.trainer.data.step_batches import custom_batch_weight


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def supervised(model: nn.Module | None = None, loss: Any = cross_entropy, **changes: Any) -> SupervisedModule:
    values: dict[str, Any] = {"optimizer": "sgd", "optimizer_kwargs": {"lr": 0.1}, "train_dataset": numbers(41)}
    return SupervisedModule(model or network(), loss, **{**values, **changes})


class Named:
    """A dataset of dicts with only `__len__` and `__getitem__`."""

    def __init__(self, count: int = 41, inputs: str = "features", target: str = "target") -> None:
        self.base, self.keys = numbers(count), (inputs, target)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, **dict(zip(self.keys, self.base[index], strict=True))}


@dataclass
class Batch:
    id: Tensor
    features: Tensor
    target: Tensor


class Net(nn.Module):
    """Takes its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, features: Tensor, scale: float = 1.0) -> Tensor:
        return self.net(features) * scale

    def doubled(self, features: Tensor) -> Tensor:
        return self.net(features) * 2


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class WithLoss(Net):
    """Computes a loss if it gets labels."""

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Output:  # type: ignore[override]
        logits = self.net(features)
        return Output(logits, None if labels is None else cross_entropy(logits, labels))


def by_hand(epochs: int = 2) -> Tensor:
    """The weights of a plain PyTorch loop over 41 samples in order, 8 at once."""
    model, data = network(), numbers(41)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for rows in torch.arange(41).split(8):
            optimizer.zero_grad()
            cross_entropy(model(data.tensors[0][rows]), data.tensors[1][rows]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return weights(model)


FORMS: dict[str, Any] = {
    "tuples": lambda: supervised(),
    "a loss module": lambda: supervised(loss=nn.CrossEntropyLoss()),
    "dicts": lambda: supervised(Net(), train_dataset=Named()),
    "a loss in the model": lambda: supervised(WithLoss(), None, train_dataset=Named(target="labels")),
    "a loss by names": lambda: supervised(
        WithLoss(),
        lambda logits, labels: cross_entropy(logits, labels),
        train_dataset=Named(target="labels"),
        train_input_mapping=lambda batch: batch,
        output_mapping={"loss": "none"},
    ),
    "dataclasses": lambda: supervised(
        Net(), train_dataset=Named(), collate_fn=lambda samples: Batch(**default_collate(samples))
    ),
    "input mapping of dicts": lambda: supervised(
        Net(), train_dataset=Named(inputs="x", target="y"), input_mapping={"x": "features", "y": "target"}
    ),
    "input mapping of tuples": lambda: supervised(Net(), input_mapping={"_0": "features", "_1": "target"}),
    "output mapping": lambda: supervised(WithLoss(), output_mapping={"logits": "input", "loss": "none"}),
    "an input called as the loss calls the outputs": lambda: supervised(
        Net(), train_dataset=Named(inputs="input"), input_mapping=lambda b: {**b, "features": b["input"]}
    ),
    "another method": lambda: supervised(
        Net(), lambda outputs, target: cross_entropy(outputs / 2, target), forward_fn="doubled"
    ),
    "an optimizer class": lambda: supervised(optimizer=torch.optim.SGD),
    "an optimizer factory": lambda: supervised(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), optimizer_kwargs=None),
}


@pytest.mark.spec("PA-01", "FN-10", "FN-15", "FN-16", "FN-17", "FN-51", "HZ-10", "HZ-24", "HZ-26")
@pytest.mark.parametrize("form", FORMS)
def test_it_trains_as_plain_pytorch(form: str, tmp_path: Path) -> None:
    module = FORMS[form]()
    module.train_dataloader_kwargs = {"shuffle": False}
    train(module, tmp_path, epochs=2, gpu_batch_size_limit=4 if form == "dicts" else 512)

    assert (weights(module.model) - by_hand()).abs().max() < 1e-6


def test_existing_optimizer_and_scheduler_objects_are_used(tmp_path: Path) -> None:
    model = network()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lrs.ConstantLR(made, factor=1.0)
    module = supervised(
        model, optimizer=made, optimizer_kwargs=None, scheduler=scheduler, train_dataloader_kwargs={"shuffle": False}
    )
    train(module, tmp_path, epochs=2)

    assert (weights(model) - by_hand()).abs().max() < 1e-6
    assert scheduler.last_epoch == 12


@pytest.mark.spec("PA-01")
@every_stack
def test_it_runs_on_every_stack(spec: str, tmp_path: Path) -> None:
    module = supervised(val_dataset=numbers(20), scheduler="warmup_cosine", scheduler_kwargs={"warmup": 0.2})
    trainer = train(module, tmp_path, backend=spec, gpu_batch_size_limit=4, epochs=2)

    assert len(trainer.history.get_metric_values("val/loss")) == 2


@pytest.mark.spec("PA-15", "HZ-10", "HZ-11", "PA-17")
def test_optimizers_and_schedulers_by_name_accept_placeholders(tmp_path: Path) -> None:
    module = supervised(
        optimizer="AdamW",
        optimizer_kwargs={"lr": 1 / placeholders.TOTAL_STEPS, "weight_decay": 0.5},
        scheduler="warmup_stable_decay",
        scheduler_kwargs={"warmup": placeholders.STEPS_PER_EPOCH // 2, "decay": placeholders.STEPS_PER_EPOCH},
    )
    state = train(module, tmp_path, epochs=3).get_state()

    assert [record["class"] for record in state["optimizers"]] == ["AdamW"]
    assert state["optimizers"][0]["groups"][0]["initial_lr"] == 1 / 18
    assert state["optimizers"][0]["groups"][0]["weight_decay"] == 0.5
    assert state["schedulers"][0]["state"]["lr_lambdas"][0] == {
        "total_steps": 18, "warmup": 3, "decay": 6, "start_ratio": 0.0, "final_ratio": 0.0, "shape": "linear",
        "k_decay": 1.0,
    }  # fmt: skip


@pytest.mark.spec("PA-11", "HZ-12")
def test_the_scheduler_may_monitor_a_metric(tmp_path: Path) -> None:
    plateau = functools.partial(lrs.ReduceLROnPlateau, patience=0, factor=0.5, threshold=1e9)
    module = supervised(val_dataset=numbers(9), scheduler=SchedulerConfig(plateau, monitor="val/loss"))
    state = train(module, tmp_path, epochs=3).get_state()

    assert state["optimizers"][0]["groups"][0]["lr"] == 0.1 * 0.5**3


class Watched(SupervisedModule):
    """Keeps the outputs that the hook gets."""

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.seen = {**getattr(self, "seen", {}), key: outputs[0]}


@pytest.mark.spec("PA-19", "FN-09", "HZ-26")
def test_loss_outputs_and_targets_reach_the_hook_after_validation(tmp_path: Path) -> None:
    data = numbers(20)
    module = Watched(network(), cross_entropy, "sgd", numbers(41), {"one": data, "two": numbers(7)})
    trainer = train(module, tmp_path, val_batch_size=6)
    with torch.no_grad():
        outputs = module.model(data.tensors[0])

    assert torch.allclose(module.seen["one"]["outputs"], outputs)
    assert torch.equal(module.seen["one"]["targets"], data.tensors[1])
    assert module.seen["two"]["targets"].shape == (7,)
    assert trainer.history.get_latest_metric("val/one/loss") == pytest.approx(
        float(cross_entropy(outputs, data.tensors[1])), rel=1e-5
    )


@pytest.mark.spec("FN-17", "HZ-26")
@pytest.mark.parametrize(("keys", "expected"), [(None, {"id", "target"}), (["target"], {"target"})])
def test_targets_are_the_unused_or_the_requested_items(keys: Any, expected: set[str], tmp_path: Path) -> None:
    module = Watched(Net(), cross_entropy, "sgd", Named(), Named(10), target_keys=keys)
    train(module, tmp_path, val_batch_size=4)

    assert set(module.seen["default"]["targets"]) == expected
    assert torch.equal(module.seen["default"]["targets"]["target"], numbers(10).tensors[1])


@pytest.mark.spec("FN-17")
def test_a_model_with_keyword_arguments_leaves_no_targets(tmp_path: Path) -> None:
    class Greedy(Net):
        def forward(self, features: Tensor, **others: Any) -> Tensor:  # type: ignore[override]
            assert set(others) == {"id", "target"}
            return super().forward(features)

    module = Watched(Greedy(), cross_entropy, "sgd", Named(), Named(10))
    train(module, tmp_path)

    assert module.seen["default"]["targets"] == {}


class OwnLoss(nn.Module):
    """Takes labels and returns a loss and logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(features)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class RightShare:
    """The share of correct predictions, and the number of all."""

    def reset(self) -> None:
        self.right = self.number = 0

    __init__ = reset

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right += int((preds.argmax(1) == target).sum())
        self.number += len(target)

    def compute(self) -> dict[str, float]:
        return {"share": self.right / self.number, "number": self.number}


def test_a_metric_gets_labels_that_the_model_takes(tmp_path: Path) -> None:
    rows = [{"features": features, "labels": label} for features, label in zip(*numbers(10).tensors, strict=True)]
    module = Watched(OwnLoss(), None, "sgd", rows, rows, metrics={"right": RightShare()})
    trainer = train(module, tmp_path, val_batch_size=4)

    logits = module.seen["default"]["outputs"]["logits"]
    share = (logits.argmax(1) == numbers(10).tensors[1]).float().mean()
    assert trainer.history.get_latest_metric("val/right/share") == pytest.approx(float(share))
    assert trainer.history.get_latest_metric("val/right/number") == 10
    assert module.seen["default"]["targets"] == {}


def test_outputs_of_a_custom_val_step_match_metrics_by_name(tmp_path: Path) -> None:
    class Ranking(SupervisedModule):
        def val_step(self, global_step: int, batch: Any, device: torch.device) -> Any:
            return {"preds": self.model(batch[0]), "target": batch[1]}

    data = numbers(10)
    module = Ranking(Net(), cross_entropy, "sgd", data, data, metrics={"right": RightShare()})
    assert train(module, tmp_path, val_batch_size=4).history.get_latest_metric("val/right/number") == 10


@pytest.mark.spec("FN-10", "FN-15", "FN-16", "HZ-17")
def test_training_and_validation_may_have_separate_mappings_and_methods(tmp_path: Path) -> None:
    module = Watched(
        Net(),
        cross_entropy,
        "sgd",
        Named(inputs="x"),
        Named(10, inputs="z"),
        val_forward_fn="doubled",
        train_input_mapping={"x": "features"},
        val_input_mapping={"z": "features"},
        val_output_mapping=lambda outputs: outputs + 100,
    )
    train(module, tmp_path, val_batch_size=10)
    with torch.no_grad():
        expected = module.model.doubled(numbers(10).tensors[0]) + 100

    assert torch.allclose(module.seen["default"]["outputs"], expected)


@pytest.mark.spec("PA-19")
@pytest.mark.parametrize("data", [numbers(9), TensorDataset(numbers(9).tensors[0]), numbers(9).tensors[0]])
def test_prediction_reads_no_target(data: Any, tmp_path: Path) -> None:
    module = supervised(test_dataset=numbers(9))
    trainer = ts.Trainer(module, arguments(tmp_path))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    expected = module.model(numbers(9).tensors[0])

    assert torch.allclose(trainer.predict(loader), expected)
    assert torch.allclose(trainer.test()["default"]["outputs"], expected)


@pytest.mark.spec("FN-17", "HZ-26")
def test_prediction_on_dicts_needs_no_labels(tmp_path: Path) -> None:
    module = supervised(WithLoss(), None, train_dataset=Named(target="labels"))
    predicted = ts.Trainer(module, arguments(tmp_path)).predict([{"features": numbers(9).tensors[0]}])

    assert predicted["logits"].shape == (9, CLASSES)


def add_one(samples: Any) -> Any:
    inputs, targets = default_collate(samples)
    return inputs + 1, targets


@pytest.mark.spec("PA-14", "HZ-26")
def test_the_collator_of_the_dataset_is_the_default(tmp_path: Path) -> None:
    data = numbers(41)
    data.data_collator = lambda samples: default_collate(samples)[::-1]  # type: ignore[attr-defined]

    assert supervised(train_dataset=data).get_train_dataloader(torch.utils.data.RandomSampler, 4).collate_fn is (
        data.data_collator  # type: ignore[attr-defined]
    )
    inputs, _ = next(
        iter(
            supervised(train_dataset=data, collate_fn=add_one).get_train_dataloader(
                torch.utils.data.SequentialSampler, 41
            )
        )
    )
    assert torch.equal(inputs, data.tensors[0] + 1)
    train(supervised(collate_fn=add_one), tmp_path)


@pytest.mark.processes
@pytest.mark.spec("PA-12", "HZ-08")
def test_loader_options_apply_to_training_or_validation() -> None:
    module = supervised(
        val_dataset=numbers(9),
        train_dataloader_kwargs={"num_workers": 1, "drop_last": True},
        val_dataloader_kwargs={"batch_size": 5},
    )
    one = module.get_train_dataloader(torch.utils.data.RandomSampler, 4)
    other = module.get_val_dataloaders(torch.utils.data.SequentialSampler, 4)

    assert (one.batch_size, one.num_workers, one.drop_last) == (4, 1, True)
    assert (other.batch_size, other.num_workers, other.drop_last) == (5, 0, False)


@pytest.mark.spec("PA-12", "PA-14")
def test_build_dataloader_works_in_a_custom_module() -> None:
    class Own(ts.ModuleInterface):
        collate_fn = staticmethod(add_one)

        def get_optimizers_schedulers(self, *_: Any) -> Any: ...

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any: ...

        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return self.build_dataloader(numbers(9), sampler, batch_size, shuffle=False)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(numbers(9))

    module = Own()
    loader = module.get_train_dataloader(torch.utils.data.RandomSampler, 4)
    assert type(loader.sampler) is torch.utils.data.SequentialSampler
    assert loader.collate_fn is add_one
    streamed = module.build_dataloader(Stream(), torch.utils.data.RandomSampler, 4)
    assert [len(targets) for _, targets in streamed] == [4, 4, 1]
    own = torch.utils.data.BatchSampler(range(9), 3, drop_last=False)
    assert len(module.build_dataloader(numbers(9), torch.utils.data.RandomSampler, 4, batch_sampler=own)) == 3


def test_a_loader_without_a_sampler_keeps_the_dataset_order(tmp_path: Path) -> None:
    seen: list[float] = []

    class InOrder(ts.SupervisedModule):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return self.build_dataloader(self.train_dataset, None, batch_size)

        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            seen.extend(batch[0].flatten().tolist())
            return super().train_step(global_step, batch, device)

    data = TensorDataset(torch.arange(10.0)[:, None], torch.ones(10, 1))
    train(InOrder(nn.Linear(1, 1), nn.MSELoss(), "sgd", data), tmp_path, train_batch_size=4)
    assert seen == list(range(10))


@pytest.mark.spec("HZ-25")
def test_move_to_device_moves_a_dataclass() -> None:
    moved = ts.move_to_device(Batch(torch.zeros(2), torch.zeros(2, 3), torch.ones(2)), torch.device("meta"))

    assert type(moved) is Batch
    assert {moved.id.device.type, moved.features.device.type, moved.target.device.type} == {"meta"}


@pytest.mark.spec("PA-06")
def test_the_batch_of_one_device_may_be_given(tmp_path: Path) -> None:
    one, other = supervised(), supervised()
    train(one, tmp_path / "one", train_batch_size=8)
    trainer = train(other, tmp_path / "other", train_batch_size=1, per_device_train_batch_size=8)

    assert torch.equal(weights(one), weights(other))
    assert trainer.plan.global_batch == trainer.pergpu_global_batch_size == 8
    with pytest.raises(
        ts.ConfigurationError, match=r"train_batch_size=8 and per_device_train_batch_size=4.*Remove one"
    ):
        arguments(tmp_path, per_device_train_batch_size=4)
    with pytest.raises(ts.ConfigurationError, match="per_device_train_batch_size=0: write a whole number, 1 or more"):
        arguments(tmp_path, train_batch_size=1, per_device_train_batch_size=0)


@pytest.mark.spec("PA-01")
def test_it_can_be_copied_and_pickled_with_its_weights(tmp_path: Path) -> None:
    module = supervised(loss=nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), scheduler="warmup_cosine")
    module.scheduler = functools.partial(module.scheduler, warmup=placeholders.TOTAL_STEPS // 3)
    twin, stranger = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for position, each in enumerate((module, twin, stranger)):
        train(each, tmp_path / str(position))

    assert torch.equal(weights(twin), weights(module))
    assert torch.equal(weights(stranger), weights(module))
    keys = {f"model.{key}" for key in network().state_dict()}
    assert set(module.state_dict()) == keys | {"loss.weight"}
    bare = network(seed=1)
    bare.load_state_dict(module.model.state_dict())
    assert torch.equal(weights(bare), weights(module))


@pytest.mark.slow
@pytest.mark.spec("PA-01", "PA-10")
@pytest.mark.parametrize(
    "spec", ["sp", *(pytest.param(spec, marks=pytest.mark.long) for spec in ("sp-amp", "ddp-amp"))]
)
def test_a_resumed_run_ends_with_the_same_bits(spec: str, tmp_path: Path) -> None:
    class Stopping(Named):
        stop = True

        def __getitem__(self, index: int) -> dict[str, Any]:
            self.reads = getattr(self, "reads", 0) + 1
            if self.stop and self.reads > 60:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    def module(data: Named) -> SupervisedModule:
        model = nn.Sequential(nn.Dropout(0.2), Net())
        return supervised(
            model,
            train_dataset=data,
            optimizer="adamw",
            scheduler="warmup_linear",
            input_mapping={"features": "input"},
        )

    every_step = ts.DefaultCheckpointerArguments(every_n_steps=1)
    saving: dict[str, Any] = {"epochs": 3, "backend": spec, "checkpointer_args": every_step}
    ts.seed_everything(3)
    unbroken = module(Named())
    train(unbroken, tmp_path / "unbroken", **saving)
    ts.seed_everything(3)
    with pytest.raises(KeyboardInterrupt):
        train(module(Stopping()), tmp_path / "cut", **saving)
    resumed = module(Named())
    train(resumed, tmp_path / "cut", resume=True, **saving)

    assert torch.equal(weights(resumed), weights(unbroken))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a class for the model": ({"model": Net}, "write an object of a torch.nn.Module"),
    "a class for the loss": (
        {"loss": nn.CrossEntropyLoss},
        r"the class CrossEntropyLoss. Write an object of it: loss=CrossEntropyLoss\(\)",
    ),
    "a name for the loss": ({"loss": "cross_entropy"}, "loss='cross_entropy': write a function such as torch"),
    "an unknown method": ({"model": Net(), "forward_fn": "fwd"}, "Net has no such method. It has forward, doubled"),
    "an unknown method for validation": ({"val_forward_fn": "v"}, "val_forward_fn='v': Sequential has no such method"),
    "two mappings": (
        {"input_mapping": {}, "val_input_mapping": {}},
        "input_mapping applies to training and validation; remove train_input_mapping and",
    ),
    "no mapping": ({"output_mapping": 3}, "output_mapping=3: write a dict of old and new names, or a function"),
    "an unknown optimizer": ({"optimizer": "adamv"}, "there is no optimizer 'adamv'. Did you mean 'adam"),
    "no optimizer": ({"optimizer": 3}, "optimizer=3: write a name such as 'adamw'"),
    "options for a made optimizer": (
        {"optimizer": torch.optim.SGD(network().parameters(), lr=0.1)},
        "optimizer_kwargs={'lr': 0.1} with an optimizer that exists already",
    ),
    "a scheduler before its optimizer": (
        {"scheduler": lrs.ConstantLR(torch.optim.SGD(network().parameters(), lr=0.1))},
        "scheduler is a ConstantLR that exists already, but the optimizer does not exist yet",
    ),
    "options for no name": (
        {"scheduler": lambda o: o, "scheduler_kwargs": {"warmup": 3}},
        "scheduler_kwargs={'warmup': 3} with a scheduler that is not a name: put them into functools.partial",
    ),
    "an unknown scheduler": ({"scheduler": "onecyclelr"}, "there is no scheduler.*mean 'OneCycleLR'"),
    "a training batch among the loader's options": (
        {"train_dataloader_kwargs": {"batch_size": 3}},
        r"train_dataloader_kwargs={'batch_size': 3}.*TrainerArguments\(train_batch_size=",
    ),
}  # fmt: skip


@pytest.mark.spec("FN-10", "HZ-10")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_arguments_are_refused_at_construction(mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(ts.ConfigurationError, match=message):
        supervised(**changes)


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "no target": ({"train_dataset": TensorDataset(torch.rand(9, FEATURES))}, "a list of 1, which has no target"),
    "a missing input": (
        {"model": Net(), "train_dataset": Named(inputs="x")},
        r"Net.forward requires 'features'. The available names are \['id', 'target', 'x'\]",
    ),
    "a missing target": (
        {"model": Net(), "train_dataset": Named(target="y")},
        r"cross_entropy requires 'target'. The available names are .*\['features', 'id', 'input', 'y'\]",
    ),
    "no loss anywhere": ({"loss": None}, "has no loss, and Sequential returned a Tensor, which contains none"),
    "no loss among the items": (
        {"model": WithLoss(), "loss": None, "train_dataset": Named()},
        r"WithLoss returned the items \['logits', 'loss'\], which contains none",
    ),
    "no data set": ({"train_dataset": 7}, "a int is not a dataset: it has no __len__ and no __getitem__"),
    "an unknown loader option": ({"train_dataloader_kwargs": {"worker": 3}}, "does not accept the options.*worker"),
    "an option that the optimizer lacks": ({"optimizer_kwargs": {"momentun": 1}}, "'sgd' has no option momentun. It"),
    "a factory of nothing": (
        {"optimizer": lambda p: None, "optimizer_kwargs": None},
        "the optimizer factory returned a NoneType. Return an optimizer of the parameters",
    ),
}  # fmt: skip


@pytest.mark.spec("FN-17", "PA-01")
@pytest.mark.parametrize("failure", FAILURES)
def test_arguments_that_contradict_the_data_are_refused(failure: str, tmp_path: Path) -> None:
    changes, message = FAILURES[failure]
    with pytest.raises((ts.ModuleContractError, ts.ConfigurationError), match=message):
        train(supervised(**changes), tmp_path)


class TokenMean(nn.Module):
    """Returns a loss: the mean over the tokens whose label is not -100."""

    shift = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 2).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x[..., None])[:, : x.shape[1] - self.shift]
        return {"loss": cross_entropy(scores.flatten(0, 1), labels[:, self.shift :].flatten())}


class TokenMeanForCausalLM(TokenMean):
    shift = 1


class ShiftsThem(TokenMean):
    """Takes labels that are already shifted."""

    def forward(self, x: Tensor, labels: Tensor, shift_labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return super().forward(x, shift_labels)


def padded(shifted: bool = False) -> list[dict[str, Tensor]]:
    """Eight rows of four tokens, with one to four labels each."""
    inputs = torch.rand(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.tensor([[1, 0, 1, 0][: 1 + i % 4] + [-100] * (3 - i % 4) for i in range(8)])
    rows = [{"x": x, "labels": row} for x, row in zip(inputs, labels, strict=True)]
    return [{**row, "shift_labels": row["labels"].flip(0)} for row in rows] if shifted else rows


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("kind", [TokenMean, TokenMeanForCausalLM, ShiftsThem, "compiled"])
def test_a_model_loss_over_labels_is_weighted_by_labels(
    kind: Any, limit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Compiled(nn.Module):  # as torch.compile makes it
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = TokenMeanForCausalLM()

        def forward(self, **inputs: Any) -> Any:
            return self._orig_mod(**inputs)

    make = Compiled if kind == "compiled" else kind
    ends, losses = [], []
    for size in (None, limit):
        rows = padded(shifted=make is ShiftsThem)
        module = supervised(make(), None, train_dataset=rows, val_dataset=rows, optimizer_kwargs={"lr": 1.0})
        trainer = train(module, tmp_path, epochs=3, train_batch_size=8, gpu_batch_size_limit=size, val_batch_size=size)
        ends.append(weights(module))
        losses.append(trainer.history.get_latest_metric("val/loss"))

    assert (ends[0] - ends[1]).abs().max() < 1e-14
    assert losses[0] == pytest.approx(losses[1], abs=1e-14)
    said = [record.getMessage() for record in caplog.records if "the loss counts as a mean" in record.getMessage()]
    assert len(said) == 2, "once a run"
    assert "labels that are not -100" in said[0]
    assert ("the first of each row" in said[0]) == (make in (TokenMeanForCausalLM, Compiled))


ROW = {"labels": torch.tensor([[1, -100, -100], [1, 0, -100]]), "x": torch.zeros(2, 3)}
COUNTS: dict[str, tuple[dict[str, Any], Any, float | None]] = {
    "a loss": ({"loss": cross_entropy}, ROW, None),
    "a loss over labels": ({"loss_weight": "labels", "loss": cross_entropy}, ROW, 3),
    "a loss over the targets of a tuple": ({"loss_weight": "labels"}, (ROW["x"], ROW["labels"]), 3),
    "a loss over the only target": ({"loss_weight": "labels", "target_keys": ["y"]}, {"y": ROW["labels"]}, 3),
    "the model's, of classes": ({"loss": None}, {"x": ROW["x"], "labels": torch.tensor([1, 2])}, 2),
    "the model's, of values": ({"loss": None}, {**ROW, "labels": torch.zeros(2, 3)}, 2),
    "the model's, of several labels": ({"loss": None}, {**ROW, "labels": torch.ones(2, 3, dtype=torch.bool)}, 2),
    "the model's, without labels": ({"loss": None}, {"x": ROW["x"]}, 2),
    "the model's, by samples": ({"loss": None, "loss_weight": "samples"}, ROW, None),
    "a function": ({"loss_weight": lambda batch: 7}, ROW, 7),
    "a name that is mapped": ({"loss": None, "input_mapping": {"y": "labels"}}, {"y": ROW["labels"]}, 3),
    "a function as mapping": ({"loss": None, "input_mapping": lambda batch: batch}, ROW, 3),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_samples_that_the_loss_averages_can_be_chosen(name: str) -> None:
    changes, batch, count = COUNTS[name]
    module = supervised(**changes)
    weigh = custom_batch_weight(module)
    assert (None if weigh is None else weigh(batch)) == count
    assert (custom_batch_weight(copy.deepcopy(module)) is None) == (count is None)


def test_an_overridden_batch_weight_is_used() -> None:
    class Mine(SupervisedModule):
        def batch_weight(self, batch: Any) -> float:
            return 5.0

    weigh = custom_batch_weight(Mine(network(), cross_entropy, "sgd", numbers(4)))
    assert weigh is not None
    assert weigh(ROW) == 5.0


def test_labels_that_are_missing_are_an_error() -> None:
    with pytest.raises(ts.ModuleContractError, match="a batch has no labels of integers"):
        supervised(loss_weight="labels").batch_weight({"x": ROW["x"]})
    with pytest.raises(ts.ConfigurationError, match="loss_weight='tokens': write 'samples', 'labels'"):
        supervised(loss_weight="tokens")


@pytest.mark.parametrize("name", ["XLNetLMHeadModel", "FlaubertWithLMHeadModel", "T5ForConditionalGeneration"])
def test_labels_count_without_shift_for_models_without_shift(name: str) -> None:
    model = type(name, (TokenMean,), {})()
    assert supervised(model, None).batch_weight(ROW) == 3
    assert supervised(type("GPT2LMHeadModel", (TokenMean,), {})(), None).batch_weight(ROW) == 1


class PredictsOnly(nn.Module):
    """Computes its loss in one method, and predicts in another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def train_step(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(features), target)}

    def evaluate_step(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"pred": self.net(features).argmax(1), "target": target}


class Right:
    right = 0

    def update(self, pred: Tensor, target: Tensor) -> None:
        self.right += int((pred == target).sum())

    def compute(self) -> int:
        return self.right

    def reset(self) -> None:
        self.right = 0


@pytest.mark.spec("FN-09", "FN-10")
def test_a_model_needs_no_loss_in_evaluation(tmp_path: Path) -> None:
    module = supervised(
        PredictsOnly(),
        None,
        train_dataset=Named(),
        val_dataset=Named(9),
        forward_fn="train_step",
        val_forward_fn="evaluate_step",
        metrics={"right": Right()},
    )
    trainer = train(module, tmp_path)
    assert "val/loss" not in trainer.history.get_metric_names()
    features, target = numbers(9).tensors
    expected = int((module.model.net(features).argmax(1) == target).sum())
    assert trainer.history.get_latest_metric("val/right") == expected


@pytest.mark.spec("FN-51")
def test_a_custom_step_may_return_a_dataclass(tmp_path: Path) -> None:
    class Own(SupervisedModule):
        def step(self, batch: Any, *, training: bool) -> Any:
            logits = self.model(batch[0])
            return Output(logits, cross_entropy(logits, batch[1]))

    one, other = Own(network(), None, "sgd", numbers(41), numbers(9)), supervised(val_dataset=numbers(9))
    one.optimizer_kwargs = other.optimizer_kwargs
    losses = [train(module, tmp_path).history.get_metric_values("val/loss") for module in (one, other)]

    assert torch.equal(weights(one), weights(other))
    assert losses[0] == losses[1]


@pytest.mark.spec("PA-01", "PA-17")
def test_it_reads_handwritten_digits(tmp_path: Path) -> None:
    """1,797 images of 8 x 8 pixels; every fifth is validation data."""
    from sklearn.datasets import load_digits

    pictures, digits = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pictures, dtype=torch.float32) / 16, torch.tensor(digits))
    rows = range(len(data))
    train_set = torch.utils.data.Subset(data, [row for row in rows if row % 5])
    held_out = torch.utils.data.Subset(data, rows[::5])
    ts.seed_everything(0)
    module = Watched(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        nn.CrossEntropyLoss(),
        "adamw",
        train_set,
        held_out,
        optimizer_kwargs={"lr": 3e-3, "weight_decay": 0.01},
        scheduler="warmup_cosine",
        scheduler_kwargs={"warmup": 0.1},
    )
    train(module, tmp_path, epochs=8, train_batch_size=32, val_batch_size=90)
    right = module.seen["default"]["outputs"].argmax(1) == module.seen["default"]["targets"]

    assert right.float().mean() > 0.9


# --- items of a batch that nothing uses


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return cast(torch.Tensor, self.net(x))


def weighted(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return nn.functional.cross_entropy(input, target)


class Takes:
    def update(self, preds: torch.Tensor, target: torch.Tensor, group: torch.Tensor) -> None:
        pass

    def compute(self) -> float:
        return 0.0

    def reset(self) -> None:
        pass


def items(**more: Any) -> list[dict[str, Any]]:
    return [{"x": torch.randn(3), "target": index % 2, **more} for index in range(8)]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention_mask": torch.ones(3)}, "'attention_mask' (did you mean 'mask' of Masks.forward?)"),
        ({"weights": torch.ones(2)}, "'weights' (did you mean 'weight' of weighted?)"),
        ({"extra": 0.5}, "'extra', which no parameter of Masks.forward or weighted takes"),
    ],
)
def test_unused_items_of_a_batch_are_logged_once(
    more: Any, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = ts.SupervisedModule(Masks(), weighted, "sgd", items(**more))
    train(module, tmp_path, epochs=2, train_batch_size=4, gpu_batch_size_limit=2)
    (told,) = [record.message for record in caplog.records if "so they are not used" in record.message]
    assert words in told


@pytest.mark.parametrize(
    ("more", "changes"),
    [
        ({"mask": torch.ones(3), "weight": torch.ones(2)}, {}),
        ({"name": "a string", "id": 7}, {}),
        ({"attention_mask": torch.ones(3)}, {"input_mapping": {"attention_mask": "mask"}}),
        ({"attention_mask": torch.ones(3)}, {"input_mapping": lambda batch: dict(batch)}),
        ({"group": 1}, {"target_keys": ["target", "group"]}),
        ({"group": 1}, {"metrics": {"takes": Takes()}}),
    ],
)
def test_used_items_of_a_batch_are_not_logged(
    more: Any, changes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(ts.SupervisedModule(Masks(), weighted, "sgd", items(**more), **changes), tmp_path, train_batch_size=4)
    assert "so they are not used" not in caplog.text


def test_items_are_not_logged_for_a_derived_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Weighed(ts.SupervisedModule):
        def batch_weight(self, batch: Any) -> float:
            return float(batch["tokens"].sum())

    train(Weighed(Masks(), weighted, "sgd", items(tokens=torch.ones(1))), tmp_path, train_batch_size=4)
    assert "so they are not used" not in caplog.text


def test_a_hook_with_separate_output_arguments_is_refused(tmp_path: Path) -> None:
    class Separate(ts.SupervisedModule):
        def on_end_val_epoch(self, global_step: int, outputs: Any, targets: Any, key: str) -> None:  # type: ignore[override]
            raise AssertionError

    class Joined(Separate):
        def on_end_val_epoch(self, global_step: int, outputs: Any, key: str) -> None:  # type: ignore[override]
            seen.append(set(outputs))

    class Custom(Separate):
        def val_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return self.model(batch[0]), batch[1]

        def on_end_val_epoch(self, global_step: int, outputs: Any, targets: Any, key: str) -> None:  # type: ignore[override]
            seen.append(len(targets))

    def trained(kind: type[ts.SupervisedModule]) -> ts.Trainer:
        trainer = ts.Trainer(
            kind(network(), cross_entropy, "sgd", numbers(9), numbers(5)), arguments(tmp_path / kind.__name__)
        )
        trainer.train()
        return trainer

    seen: list[Any] = []
    with pytest.raises(
        ts.ModuleContractError, match=r"def on_end_val_epoch\(self, global_step, outputs, key\).*one dict"
    ):
        trained(Separate)
    for kind in (Joined, Custom):
        trained(kind)
    assert {"loss", "outputs", "targets"} in seen
    assert 5 in seen
