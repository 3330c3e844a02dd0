"""State that carries records from one private step into later ones."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainstack as ts
from tests.helpers.modules import arguments
from trainstack.backends.dp.sealed.plain_state import same_value
from trainstack.backends.dp.sealed.tensor_digest import FOLD, TensorDigest
from trainstack.errors import PrivacyError

RECORDS, BATCH, STEPS, WIDTH = 64, 16, 6, 5


def _steps_of(record: int, seed: int) -> list[int]:
    draws = (np.random.default_rng([seed, step, 0]).random(RECORDS) for step in range(1, STEPS + 1))
    return [step for step, draw in enumerate(draws, 1) if draw[record] < BATCH / RECORDS]


SEED = next(seed for seed in range(10_000) if _steps_of(0, seed) == [3])
"""A debug seed that draws record 0 in step 3 only."""


class Net(ts.ModuleInterface):
    """A linear classifier whose input is shifted by `buffer` and `kept`; its weights stay where they are."""

    def __init__(self, value: float, dataset: type[Dataset[Any]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(WIDTH, 3)
        self.register_buffer("buffer", torch.zeros(WIDTH), persistent=False)
        self.kept: Any = None
        self.seen = 0
        x = torch.randn(RECORDS, WIDTH)
        x[0] = value
        made = TensorDataset(x, torch.randint(0, 3, (RECORDS,)))
        self.data: Any = made if dataset is None else dataset(made)  # type: ignore[call-arg]
        self.sums: list[Tensor] = []

    def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
        return DataLoader(self.data, sampler=sampler(self.data), batch_size=batch_size)

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.0)], []

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        x, y = batch
        self.remember(global_step, x.detach())
        shift = self.buffer if self.kept is None else self.shift()
        return cross_entropy(self.net(x - shift), y, reduction="none").mean()

    def shift(self) -> Tensor:
        return torch.as_tensor(self.kept)

    def remember(self, step: int, x: Tensor) -> None: ...


class Gradients(ts.Callback):
    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any) -> None:
        self.sums.append(BATCH * torch.cat([p.grad.flatten() for p in trainer.module.parameters()]))


def sums_of(directory: Any, module: ts.ModuleInterface, callbacks: Any = (), **given: Any) -> list[Tensor]:
    """The sums of clipped gradients of each step that was released, in units of C."""
    seen = Gradients()
    private = ts.DifferentialPrivacyArguments(
        **{"delta": 1e-4, "noise_multiplier": 0.0, "debug_seed": SEED, "accountant": "rdp", "grad_mode": "loop"} | given
    )
    args = arguments(
        directory,
        backend="sp-dp",
        differential_privacy_args=private,
        epochs=2,
        max_train_steps_per_epoch=STEPS // 2,
        train_batch_size=BATCH,
        writers=[],
    )
    ts.Trainer(module, args, callbacks=[seen, *callbacks]).train()
    return seen.sums


def private_trainer(directory: Any, module: ts.ModuleInterface, callbacks: Any = (), **given: Any) -> ts.Trainer:
    """Of a run with noise and without a debug seed."""
    given = {"delta": 1e-4, "noise_multiplier": 1.0, "accountant": "rdp"} | given
    promise = ts.DifferentialPrivacyArguments(**given)
    args = arguments(
        directory, backend="sp-dp", differential_privacy_args=promise, epochs=2, train_batch_size=BATCH, writers=[]
    )
    return ts.Trainer(module, args, callbacks=callbacks)


def refused_or_bounded(directory: Any, make: Callable[[float], tuple[ts.ModuleInterface, Any]]) -> str:
    """The message of the refusal, or "" where the sums of steps 4 to 6 do not depend on record 0."""
    runs = []
    for number, value in enumerate((0.5, 500.0)):
        module, callbacks = make(value)
        try:
            runs.append(sums_of(directory / str(number), module, callbacks))
        except PrivacyError as error:
            return str(error)
    for one, other in zip(runs[0][3:], runs[1][3:], strict=True):
        assert float((one - other).norm()) < 1e-3
    return ""


# --- parameters and buffers


def by_data(module: Net, x: Tensor) -> None:
    module.buffer.data.mul_(0.9).add_(0.1 * x.mean(0))


def by_numpy(module: Net, x: Tensor) -> None:
    module.buffer.numpy()[:] = x.mean(0).numpy()


def in_place(module: Net, x: Tensor) -> None:
    module.buffer.copy_(x.mean(0))


def by_assignment(module: Net, x: Tensor) -> None:
    module._buffers["buffer"] = x.mean(0)


def of_parameter(module: Net, x: Tensor) -> None:
    module.net.bias.data.add_(x.mean())


def of_parameter_by_swap(module: Net, x: Tensor) -> None:
    module.net._parameters["bias"] = nn.Parameter(module.net.bias.detach() + x.mean())


WRITES = [by_data, by_numpy, in_place, by_assignment, of_parameter, of_parameter_by_swap]


@pytest.mark.parametrize("write", WRITES)
def test_a_late_write_in_the_forward_pass_is_refused(write: Callable[..., None], tmp_path: Any) -> None:
    class Writing(Net):
        def remember(self, step: int, x: Tensor) -> None:
            if step >= 3:
                write(self, x)

    with pytest.raises(PrivacyError) as raised:
        sums_of(tmp_path, Writing(0.5))
    name = "bias" if write in (of_parameter, of_parameter_by_swap) else "buffer"
    seen_at_once = write in (in_place, by_assignment, of_parameter_by_swap)
    what = ["changes in a forward pass"] if seen_at_once else []
    what.append("has changed, but not by an optimizer step")  # found by a comparison between forward passes
    assert any(f"{name} {words}" in str(raised.value) for words in what)
    assert "global step 3" in " ".join(raised.value.__notes__)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_of_records_under_vmap_ends_the_run(write: Callable[..., None], tmp_path: Any) -> None:
    class Writing(Net):
        def remember(self, step: int, x: Tensor) -> None:
            if step >= 3:
                write(self, x)

    with pytest.raises((PrivacyError, RuntimeError)) as raised:
        sums_of(tmp_path, Writing(0.5), grad_mode="bookkeeping")
    notes = " ".join(raised.value.__notes__)
    assert "global step 3" in notes
    assert isinstance(raised.value, PrivacyError) or "each record separately" in notes


def test_a_tensor_of_a_finished_vmap_equals_no_other() -> None:
    kept: list[Tensor] = []

    def keep(row: Tensor) -> Tensor:
        kept.append(row * 2)
        return row

    for _ in range(2):
        torch.vmap(keep)(torch.ones(3))
    assert not same_value(*kept)


def test_a_queue_of_hidden_values_is_refused_by_name(tmp_path: Any) -> None:
    class Queued(Net):
        def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
            hidden = self.net(batch[0])
            loss = cross_entropy(hidden, batch[1]) - (hidden[:, 0] * self.buffer[0]).mean()
            if global_step >= 2:
                self.buffer[0] = hidden[0, 0].detach()
            return loss

    with pytest.raises(PrivacyError, match=r"^buffer changes in a forward pass"):
        sums_of(tmp_path, Queued(0.5), grad_mode="loop")
    with pytest.raises(PrivacyError, match=r"train_step writes values of a record into a tensor.*a queue"):
        sums_of(tmp_path / "together", Queued(0.5), grad_mode="bookkeeping")


class WritesAt(ts.Callback):
    """Writes values that the module has kept of its records into a buffer or parameter, at one event."""

    def __init__(self, event: str, write: Callable[..., None]) -> None:
        setattr(self, f"on_{event}", lambda trainer: self.act(trainer.module, write))
        self.expects_all_events = False

    def act(self, module: Any, write: Callable[..., None]) -> None:
        if module.x is not None:
            write(module, module.x)


class Keeps(Net):
    """Keeps the records of step 3, which nothing in the module reads."""

    x: Any = None

    def remember(self, step: int, x: Tensor) -> None:
        if step == 3:
            self.x = x


EVENTS = ["train_batch_begin", "before_optimizer_step", "after_optimizer_step", "train_step_end", "train_epoch_end"]


CASES = [*((event, by_data) for event in EVENTS), (EVENTS[0], of_parameter), (EVENTS[0], of_parameter_by_swap)]


@pytest.mark.parametrize(("event", "write"), CASES)
def test_a_write_by_a_callback_is_refused(event: str, write: Callable[..., None], tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match=r"(net\.bias|buffer) has changed, but not by an optimizer step"):
        sums_of(tmp_path, Keeps(0.5), [WritesAt(event, write)])


def test_a_change_reverted_before_the_optimizer_step_is_refused(tmp_path: Any) -> None:
    class Swaps(ts.Callback):
        def on_train_batch_begin(self, trainer: Any) -> None:
            trainer.module.buffer.add_(1.0)

        def on_after_backward(self, trainer: Any) -> None:
            trainer.module.buffer.sub_(1.0)

    with pytest.raises(PrivacyError, match="buffer has changed, but not by an optimizer step"):
        sums_of(tmp_path, Net(0.5), [Swaps()])


def test_a_change_in_the_first_step_is_refused(tmp_path: Any) -> None:
    class Changes(ts.Callback):
        once = False

        def on_after_backward(self, trainer: Any) -> None:
            if not self.once:
                trainer.module.buffer.add_(1.0)
            self.once = True

    with pytest.raises(PrivacyError, match="buffer has changed, but not by an optimizer step") as raised:
        sums_of(tmp_path, Net(0.5), [Changes()])
    assert "global step 1" in " ".join(raised.value.__notes__)


@pytest.mark.parametrize("name", ["small", "large", "odd", "other", "last"])
def test_a_digest_names_the_one_tensor_that_has_changed(name: str) -> None:
    sizes = {"small": 9, "large": 5 * FOLD, "odd": 3 * FOLD + 7, "other": 12, "last": 4 * FOLD}
    tensors = {key: torch.arange(size, dtype=torch.int64) for key, size in sizes.items()}
    digest = TensorDigest()
    before = digest.compute(tensors)
    tensors[name][-1] += 1
    assert digest.compute(tensors).changed(before) == [name]


def test_the_statement_of_a_reported_change_names_it(tmp_path: Any) -> None:
    trainer = private_trainer(
        tmp_path, Keeps(0.5), [WritesAt("train_step_end", by_data)], on_unsafe="report", grad_mode="loop"
    )
    trainer.train()
    assert "NOT PRIVATE: buffer has changed, but not by an optimizer step" in trainer.privacy_statement().text


def test_post_processing_may_change_weights_and_buffers(tmp_path: Any) -> None:
    class Averages(ts.Callback):
        def on_train_step_end(self, trainer: Any) -> None:
            with trainer.post_processing():
                for tensor in (*trainer.module.parameters(), trainer.module.buffer):
                    tensor.data.mul_(0.5)

    assert len(sums_of(tmp_path / "private", Net(0.5), [Averages()])) == STEPS
    trainer = ts.Trainer(Net(0.5), arguments(tmp_path / "plain", train_batch_size=BATCH), callbacks=[Averages()])
    trainer.train()


# --- hooks and events get no records


HOOKS = [
    ("on_end_backward", lambda self, step, loss: None),
    ("on_end_train_step", lambda self, step, loss: None),
    ("on_end_train_epoch", lambda self, step, loss: None),
    ("on_train_batch_begin", lambda self, trainer, batch: None),
    ("on_fetch_data_end", lambda self, trainer, batch: None),
    ("on_before_backward", lambda self, trainer, outputs: None),
    ("on_after_backward", lambda self, trainer, loss: None),
]


@pytest.mark.parametrize(("name", "hook"), HOOKS)
def test_a_hook_that_takes_records_is_refused_at_the_start(name: str, hook: Any, tmp_path: Any) -> None:
    with pytest.raises(PrivacyError, match=rf"Hooked\.{name}.*expose_records=True"):
        sums_of(tmp_path / "module", type("Hooked", (Net,), {name: hook})(0.5))
    if not name.startswith("on_end"):
        with pytest.raises(PrivacyError, match=rf"Hooked\.{name}.*expose_records=True"):
            sums_of(tmp_path / "callback", Net(0.5), [type("Hooked", (ts.Callback,), {name: hook})()])


def test_a_hook_with_optional_outputs_is_called_without_them(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Hooked(Net):
        given: tuple[Any, ...] = ()

        def on_end_train_step(self, global_step: int, *outputs: Any) -> None:
            self.given += outputs

        def on_train_batch_begin(self, trainer: Any, *batch: Any) -> None:
            self.given += batch

    module = Hooked(0.5)
    sums_of(tmp_path, module)
    assert module.given == ()
    assert "on_end_train_step of Hooked will be called without outputs" in caplog.text


def test_a_run_whose_hooks_get_records_is_not_private(tmp_path: Any) -> None:
    trainer = private_trainer(tmp_path, type("Hooked", (Net,), dict(HOOKS))(0.5), expose_records=True)
    seen: list[Any] = []
    trainer.on(ts.Event.TRAIN_BATCH_BEGIN)(lambda trainer, batch: seen.append(batch))
    trainer.train()
    assert seen
    assert "NOT PRIVATE: hooks and events were given records" in trainer.privacy_statement().text


def test_a_late_subscription_that_takes_records_is_refused(tmp_path: Any) -> None:
    class Subscribes(ts.Callback):
        def on_train_begin(self, trainer: Any) -> None:
            trainer.on(ts.Event.TRAIN_BATCH_BEGIN)(lambda trainer, batch: None)

    with pytest.raises(PrivacyError, match="expose_records=True"):
        sums_of(tmp_path, Net(0.5), [Subscribes()])


# --- plain attributes


def slow_mean(before: Any, x: Tensor) -> Tensor:
    return (0.0 if before is None else 0.9 * torch.as_tensor(before)) + 0.1 * x.mean(0)


class Mean:
    """A user's object in an attribute."""

    def __init__(self) -> None:
        self.value = torch.zeros(WIDTH)

    def update(self, x: Tensor) -> None:
        self.value = slow_mean(self.value, x)


def as_tensor(module: Net, x: Tensor) -> None:
    module.kept = slow_mean(module.kept, x)


def as_list(module: Net, x: Tensor) -> None:
    module.kept = slow_mean(module.kept, x).tolist()


def as_number(module: Net, x: Tensor) -> None:
    module.kept = 0.9 * (module.kept or 0.0) + 0.1 * float(x.mean())


def as_array(module: Net, x: Tensor) -> None:
    module.kept = slow_mean(module.kept, x).numpy().copy()


def in_dict(module: Net, x: Tensor) -> None:
    module.kept = module.kept or {"mean": torch.zeros(WIDTH)}
    module.kept["mean"].data.copy_(slow_mean(module.kept["mean"], x))


def in_object(module: Net, x: Tensor) -> None:
    module.kept.update(x)


class Shifts(Net):
    def __init__(self, value: float, write: Callable[..., None]) -> None:
        super().__init__(value)
        self.write = write
        if write is in_object:
            self.kept = Mean()

    def remember(self, step: int, x: Tensor) -> None:
        if step >= 3:
            self.write(self, x)

    def shift(self) -> Tensor:
        kept = self.kept
        if isinstance(kept, Mean):
            return kept.value
        return torch.as_tensor(kept["mean"] if isinstance(kept, dict) else kept)


@pytest.mark.parametrize("write", [as_tensor, as_list, as_number, as_array, in_dict, in_object])
def test_an_attribute_that_is_written_late_is_refused(write: Callable[..., None], tmp_path: Any) -> None:
    message = refused_or_bounded(tmp_path, lambda value: (Shifts(value, write), ()))
    assert "kept" in message
    assert "other gradients" in message


class Harmless(Net):
    """Counts, logs, keeps values without influence, and builds a table that depends on no record."""

    table: Any = None

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.seen, self.recent, self.losses, self.alpha = 0, [], Mean(), 1.0

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
        self.seen += len(batch[0])
        self.losses.update(batch[0].detach())
        self.recent = [*self.recent, batch[0].detach().mean()][-3:]
        self.batch = batch
        return cross_entropy(self.net(batch[0] + self.table), batch[1], reduction="none").mean()


def test_attributes_without_influence_are_not_refused(tmp_path: Any) -> None:
    assert len(sums_of(tmp_path, Harmless(0.5))) == STEPS


def test_a_number_that_a_hook_sets_is_noted(tmp_path: Any) -> None:
    class Anneals(Net):
        alpha = 1.0

        def on_begin_train_epoch(self, global_step: int, epoch: int) -> None:
            self.alpha = 1.0 / (1 + epoch)

        def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
            return self.alpha * super().train_step(global_step, batch, device)

    trainer = private_trainer(tmp_path, Anneals(0.5))
    trainer.train()
    assert "changes of alpha during training" in trainer.privacy_statement().not_covered


# --- data sets


class Wraps(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner, self.fetched, self.mean = inner, 0, torch.zeros(WIDTH)

    def __len__(self) -> int:
        return len(self.inner)


class Learns(Wraps):
    """Centres samples by a running mean, once training has begun."""

    active = False

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        if self.active:
            self.mean = 0.9 * self.mean + 0.1 * x
        return x - self.mean, y


class Mixes(Wraps):
    def __getitem__(self, index: int) -> Any:
        (x, y), (other, _) = self.inner[index], self.inner[(index + 1) % len(self)]
        return 0.7 * x + 0.3 * other, y


def test_a_dataset_that_begins_to_learn_is_refused(tmp_path: Any) -> None:
    class Starts(ts.Callback):
        def on_train_step_end(self, trainer: Any, step: int) -> None:
            trainer.module.data.active = step >= 1

    message = refused_or_bounded(tmp_path, lambda value: (Net(value, Learns), [Starts()]))
    assert "gives another sample for the same record" in message


def test_a_dataset_that_mixes_records_is_refused(tmp_path: Any) -> None:
    message = refused_or_bounded(tmp_path, lambda value: (Net(value, Mixes), ()))
    assert "reads several records for one sample" in message


def test_a_dataset_whose_samples_cannot_be_repeated_is_noted(tmp_path: Any) -> None:
    class Draws(Wraps):
        def __getitem__(self, index: int) -> Any:
            x, y = self.inner[index]
            noise = torch.from_numpy(np.frombuffer(secrets.token_bytes(WIDTH), np.uint8) / 255.0).float()
            return x + 1e-6 * noise, y

    trainer = private_trainer(tmp_path, Net(0.5, Draws))
    trainer.train()
    assert any("not the same when fetched again" in line for line in trainer.privacy_statement().not_covered)


# --- no alarm


class Usual(Net):
    """Parametrizations, tied and frozen weights, an adapter, two optimizers, schedules, validation."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.first = weight_norm(nn.Linear(WIDTH, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.tied = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.best: float | None = None

    def train_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        h = self.first(batch[0]) * self.scale
        h = self.drop(torch.relu(self.frozen(h) + self.up(self.down(h))))
        h = self.tied(torch.relu(self.tied(h)))
        return cross_entropy(self.last(h), batch[1], reduction="none").mean()

    def val_step(self, global_step: int, batch: Any, device: torch.device) -> Tensor:
        return self.train_step(global_step, batch, device)

    def get_val_dataloaders(self, sampler: Any, batch_size: int) -> Any:
        public = TensorDataset(*(tensor.clone() for tensor in self.data.tensors))
        return DataLoader(public, sampler=sampler(public), batch_size=batch_size)

    def on_end_val_epoch(self, global_step: int, *outputs: Any, key: str = "default") -> None:
        self.best = float(outputs[0].mean()) if outputs else None

    def get_optimizers_schedulers(self, *given: Any) -> Any:
        trained = [p for name, p in self.named_parameters() if p.requires_grad and not name.startswith("net.")]
        self.net.requires_grad_(False)
        first = torch.optim.SGD(trained[:2], lr=0.1, momentum=0.9, weight_decay=0.1)
        second = torch.optim.AdamW(trained[2:], lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (first, second)]


def test_usual_runs_are_not_refused(tmp_path: Any) -> None:
    promise = ts.DifferentialPrivacyArguments(
        delta=1e-4, noise_multiplier=1.0, accountant="rdp", public_validation=True
    )
    args = arguments(
        tmp_path,
        backend="sp-dp",
        differential_privacy_args=promise,
        epochs=2,
        train_batch_size=BATCH,
        val_batch_size=BATCH,
        gpu_batch_size_limit=5,
        sanity_val_steps=1,
        writers=[],
        checkpointer_args=ts.DefaultCheckpointerArguments(),
    )
    made = ts.Trainer(Usual(), args, callbacks=[ts.callbacks.EMA(0.9), ts.callbacks.BestCheckpoint("val/loss")])
    made.train()
    resumed = ts.Trainer(Usual(), replace(args, epochs=3, resume=True), callbacks=[ts.callbacks.EMA(0.9)])
    resumed.train()
    assert resumed.privacy_statement().overrides == ()
    assert not any("changes of" in line for line in resumed.privacy_statement().not_covered)


def test_spectral_norm_learns_in_the_forward_pass_and_is_refused(tmp_path: Any) -> None:
    class Spectral(Net):
        def __init__(self) -> None:
            super().__init__(0.5)
            self.net = spectral_norm(self.net)

    with pytest.raises(PrivacyError, match="changes in a forward pass"):
        sums_of(tmp_path, Spectral())
