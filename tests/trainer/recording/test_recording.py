"""The step log of a run has the bits of each step: loss, norm, samples, rates, skipped steps, details."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers, train
from trainstack.step_log import ABSENT, Flag, contradicting_checkpoints, ranks_of, read_step_log
from trainstack.trainer.recording.digests import digest_indices, digest_rates, digest_tensors
from trainstack.trainer.recording.log_file import LogFile
from trainstack.trainer.recording.recorder import DETAILS_EVERY

WRITES: dict[str, Any] = {"writers": ["csv"]}
SAVES: dict[str, Any] = {"checkpointer_args": ts.DefaultCheckpointerArguments(every_n_steps=4, keep_last=None)}


class Indexed(Dataset[tuple[Tensor, Tensor]]):
    """Records the indices of fetched samples."""

    def __init__(self, count: int) -> None:
        self.base, self.asked = numbers(count), list[int]()

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked.append(index)
        return self.base[index]


class Noting(Classifier):
    """Records its losses and, after each step, digests of its weights."""

    def __init__(self, count: int = 40, **changes: Any) -> None:
        super().__init__(Indexed(count), **changes)
        self.seen: dict[str, list[Any]] = {"loss": [], "rate": [], "weights": [], "gradients": []}

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch: int, epochs: int) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        self.seen["optimizer"] = [optimizer]
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = super().train_step(global_step, batch, device)
        self.seen["loss"].append(loss.item())
        return loss

    def on_end_train_step(self, global_step: int) -> None:
        self.seen["weights"].append(digest_tensors(self.parameters()))


def test_each_entry_has_the_bits_of_its_step(tmp_path: Path) -> None:
    """Two micro-batches of 3 samples, so that a step's loss is a weighted sum."""
    module = Noting(18)
    rates = list[float]()
    trainer = ts.Trainer(
        module, arguments(tmp_path, train_batch_size=6, gpu_batch_size_limit=4, epochs=2, log_every=1, **WRITES)
    )

    @trainer.on(ts.Event.BEFORE_OPTIMIZER_STEP)
    def note(trainer: Any, optimizers: Any) -> None:
        rates.append(optimizers[0].param_groups[0]["lr"])

    dataset = module.dataset
    trainer.train()
    asked = dataset.asked[-36:]  # earlier ones were fetched for the hashes of the start
    log = read_step_log(tmp_path)
    entries, losses = log.entries, module.seen["loss"]
    assert entries["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert entries["epoch"].tolist() == [0, 0, 0, 1, 1, 1]
    assert entries["loss"].tolist() == [a * 0.5 + b * 0.5 for a, b in zip(*[iter(losses)] * 2, strict=True)]
    norms = [record.value for record in trainer.history.records("train/grad_norm")]
    assert entries["norm"].tolist() == norms
    assert entries["rates"].tolist() == [digest_rates([rate]) for rate in rates]
    assert len(set(rates)) == 3
    steps = [[torch.tensor(asked[at : at + 6])] for at in range(0, 36, 6)]
    assert entries["samples"].tolist() == digest_indices(steps)
    assert set(entries["flags"].tolist()) == {int(Flag.NORM | Flag.SAMPLES)}
    assert [end.status for end in log.ends] == ["finished"]


def test_samples_of_a_custom_order_are_not_recorded(tmp_path: Path) -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            return iter(numbers(16))

    class Own(Classifier):
        def get_train_dataloader(self, sampler: Any, batch_size: int) -> Any:
            return DataLoader(Stream(), batch_size=batch_size)

    train(Own(), tmp_path, **WRITES)
    log = read_step_log(tmp_path)
    assert set(log.entries["flags"].tolist()) == {int(Flag.NORM)}
    assert log.details(1) is not None


def test_the_full_record_has_each_gradient_weight_and_state(tmp_path: Path) -> None:
    module = Noting(24)
    trainer = ts.Trainer(module, arguments(tmp_path, epochs=1, record="full"))

    @trainer.on(ts.Event.BEFORE_OPTIMIZER_STEP)
    def note(trainer: Any, optimizers: Any) -> None:
        module.seen["gradients"].append(digest_tensors(p.grad for p in module.parameters()))

    trainer.train()
    log = read_step_log(tmp_path)
    assert log.steps_with_details() == [1, 2, 3]
    for step in (1, 2, 3):
        details = log.details(step)
        assert details is not None
        assert details.weights.tolist() == module.seen["weights"][step - 1]
        assert details.gradients.tolist() == module.seen["gradients"][step - 1]
        assert list(details.parameters) == [name for name, _ in module.named_parameters()]
        assert set(details.generators) == {"python", "numpy", "torch"}
        assert ABSENT not in details.optimizer_states
    assert len({log.details(step).optimizer_states.tobytes() for step in (1, 2, 3)}) == 3  # type: ignore[union-attr]


def test_records_differ_exactly_where_runs_differ(tmp_path: Path) -> None:
    def record(name: str, **changes: Any) -> Any:
        torch.manual_seed(changes.pop("generator", 0))
        edited = changes.pop("edited", False)
        module = Classifier(numbers(24), dropout=0.5, lr=changes.pop("lr", 0.1))
        if edited:
            module.dataset.tensors[0][int(changes.pop("sample", 0))] += 1e-3
        train(module, tmp_path / name, record="full", **changes)
        log = read_step_log(tmp_path / name)
        return log, [log.details(step) for step in (1, 2, 3)]

    first, details = record("first")
    again, same = record("again")
    assert first.entries.tobytes() == again.entries.tobytes()
    for one, other in zip(details, same, strict=True):
        assert (one.batch, one.generators) == (other.batch, other.generators)
        for name in ("gradients", "weights", "optimizer_states"):
            assert getattr(one, name).tobytes() == getattr(other, name).tobytes()

    _, drawn = record("drawn", generator=1)
    assert (drawn[0].batch, drawn[0].generators["python"]) == (details[0].batch, details[0].generators["python"])
    assert drawn[0].generators["torch"] != details[0].generators["torch"]
    assert drawn[0].gradients.tobytes() != details[0].gradients.tobytes()

    _, edited = record("edited", edited=True)
    assert edited[0].generators == details[0].generators
    assert sum(one.batch != other.batch for one, other in zip(edited, details, strict=True)) == 1

    other, faster = record("faster", lr=0.2)
    assert faster[0].gradients.tobytes() == details[0].gradients.tobytes()
    assert faster[0].weights.tobytes() != details[0].weights.tobytes()
    assert other.entries["rates"][0] != first.entries["rates"][0]


def test_details_are_at_the_first_step_and_distant_log_points(tmp_path: Path) -> None:
    train(Classifier(numbers(500)), tmp_path, train_batch_size=2, log_every=70, **WRITES)
    assert DETAILS_EVERY == 200
    assert read_step_log(tmp_path).steps_with_details() == [1, 210]


def test_a_skipped_step_is_marked(tmp_path: Path) -> None:
    class Sometimes(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * (float("inf") if global_step == 2 else 1.0)

    train(Sometimes(numbers(32)), tmp_path, nonfinite="skip", **WRITES)
    entries = read_step_log(tmp_path).entries
    assert (entries["flags"] & Flag.SKIPPED).tolist() == [0, Flag.SKIPPED, 0, 0]
    assert np.isinf(entries["loss"]).tolist() == [False, True, False, False]


def test_steps_before_a_nonfinite_error_are_recorded(tmp_path: Path) -> None:
    class Poisoned(Classifier):
        def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
            return super().train_step(global_step, batch, device) * (float("nan") if global_step == 3 else 1.0)

    with pytest.raises(ts.NonFiniteError):
        train(Poisoned(numbers(40)), tmp_path, log_every=5, **WRITES)
    log = read_step_log(tmp_path)
    assert np.isnan(log.entries["loss"]).tolist() == [False, False, True, True, True]
    assert [end.status for end in log.ends] == ["failed"]


@pytest.mark.parametrize("changes", [{"record": "off", **WRITES}, {}, {"fast_dev_run": True, **WRITES}])
def test_a_run_that_records_nothing_writes_no_log(changes: dict[str, Any], tmp_path: Path) -> None:
    train(Classifier(), tmp_path, **changes)
    assert not list(tmp_path.rglob("step_log"))


def test_an_evaluation_writes_no_log(tmp_path: Path) -> None:
    ts.Trainer(Classifier(validate=True), arguments(tmp_path, **WRITES)).validate()
    assert ranks_of(tmp_path) == []


def test_the_start_has_arguments_environment_code_data_and_weights(tmp_path: Path) -> None:
    module = Classifier(numbers(24))
    before = digest_tensors(module.parameters())
    train(module, tmp_path, epochs=2, seed=5, **WRITES, **SAVES)
    (start,) = read_step_log(tmp_path).segments
    assert start.description["arguments"]["seed"] == "5"
    assert start.description["environment"]["torch"] == str(torch.__version__)
    assert "Classifier.train_step" in start.description["code"]
    assert start.description["data"]["length of the data set"] == "24"
    assert len([name for name in start.description["data"] if name.startswith("sample ")]) == 3
    assert [int(text, 16) for text in start.description["weights"].values()] == before


def test_an_unwritable_log_is_abandoned_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append, calls = LogFile.append, list[int]()

    def full(self: LogFile, *given: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        append(self, *given)

    monkeypatch.setattr(LogFile, "append", full)
    trainer = train(Classifier(numbers(80)), tmp_path, log_every=2, **WRITES, **SAVES)
    assert trainer.state.global_step == 10
    assert caplog.text.count("No space left on device") == 1
    assert read_step_log(tmp_path).entries["step"].tolist() == [1, 2]
    assert contradicting_checkpoints(tmp_path) == []


def test_overwrite_deletes_the_log_of_the_run(tmp_path: Path) -> None:
    train(Classifier(numbers(24)), tmp_path, **WRITES)
    train(Classifier(numbers(16)), tmp_path, overwrite=True, **WRITES)
    log = read_step_log(tmp_path)
    assert (len(log.segments), len(log.entries)) == (1, 2)


def test_a_private_folder_has_a_private_log(tmp_path: Path) -> None:
    train(Classifier(numbers(16)), tmp_path, private_files=True, **WRITES)
    assert stat.S_IMODE(read_step_log(tmp_path).path.stat().st_mode) == 0o600
