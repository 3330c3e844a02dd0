"""Copies to and from a device, and the current device, on a GPU that these tests pretend to have."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainstack as ts
from tests.helpers.modules import FEATURES, Classifier, numbers, train
from tests.helpers.pretended_gpu import PretendedGpu, pretended_gpu
from trainstack.backends import Communicator, World, fast_paths
from trainstack.backends.single_process import SingleProcess, after_copies
from trainstack.trainer.evaluation.metrics import MetricPass

CUDA = torch.device("cuda:0")
LIBRARY = Path(ts.__file__).parent


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu() as pretended:
        yield pretended


# --- to the host


class Sum:
    def __init__(self) -> None:
        self.total = 0.0

    def update(self, x: Tensor) -> None:
        self.total += float(x.numpy().sum())  # reads without a wait, as pickling does

    def compute(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


class Alone(Communicator):
    def gather(self, value: Any, what: str = "") -> list[Any]:
        return [pickle.loads(pickle.dumps(value))]


def test_metric_inputs_have_arrived_when_they_are_sent(gpu: PretendedGpu) -> None:
    """Nothing in this pass waits for the device: the step returns predictions and no loss."""
    module: Any = SimpleNamespace(metric_inputs=lambda outputs, batch: (outputs,))
    metrics = MetricPass({"sum": Sum()}, module, World(rank=0, size=2), ts.Stage.VAL, in_parts=True)
    for i in range(3):
        metrics.add(torch.full((2,), float(i)), None)
    assert metrics.results(Alone()) == {"sum": 6.0}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("where", ["cpu", "mps", "meta"])
def test_only_copies_to_cuda_do_not_wait(where: str) -> None:
    seen: list[Any] = []

    class Watched(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs.get("non_blocking", False))
            return self

    value = torch.zeros(2).as_subclass(Watched)
    ts.move_to_device({"x": [value]}, torch.device(where))
    ts.move_to_device((value,), CUDA)
    assert seen == [False, True]


# The copies that do not wait, each with the wait that follows it.
NON_BLOCKING = {
    "backends/single_process.py": 1,  # to a device only, waited for by `after_copies`
    "checkpointing/async_writer.py": 1,  # to pinned memory, and the stream is waited for in the same function
}


def sources(word: str) -> Iterator[tuple[str, list[ast.AST]]]:
    """The nodes of each file of the library in which `word` occurs."""
    for path in sorted(LIBRARY.rglob("*.py")):
        if word in (text := path.read_text("utf-8")):
            yield path.relative_to(LIBRARY).as_posix(), list(ast.walk(ast.parse(text)))


def test_no_other_copy_is_without_a_wait() -> None:
    found = {}
    for name, nodes in sources("non_blocking"):
        calls = [node for node in nodes if isinstance(node, ast.keyword)]
        count = sum(
            call.arg == "non_blocking" and not (isinstance(call.value, ast.Constant) and call.value.value is False)
            for call in calls
        )
        if count:
            found[name] = count
    assert found == NON_BLOCKING


# --- float64, which MPS does not have

ON_HOST = {
    "auditing/canaries.py": 3,  # behind .cpu(), and of Python numbers
    "auditing/canary_bounds.py": 1,  # of Python numbers
    "auditing/mechanism_probes.py": 2,  # masks on the host
    "auditing/module_audit.py": 1,  # behind .cpu()
    "backends/dp/checks.py": 3,  # a name, behind .cpu(), and of Python numbers
    "backends/dp/random_functions.py": 1,  # behind .cpu()
    "backends/dp/record_streams.py": 2,  # of float64 numbers alone
    "backends/processes/communicator.py": 1,  # bytes that gloo has received on the host
    "backends/processes/reducer.py": 1,  # a name
    "checkpointing/difference.py": 1,  # two files
    "cli/predictions.py": 1,  # a name
    "checkpointing/encoding.py": 1,  # a name
    "checkpointing/pretrained/matching.py": 1,  # tensors of a file
    "sklearn/estimators.py": 1,  # behind .cpu()
    "trainer/module_checks.py": 1,  # a name
}


def test_nothing_computes_in_float64_on_a_device() -> None:
    found = {}
    for name, nodes in (*sources("double"), *sources("float64")):
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        count = sum(node.attr == "double" or ast.unparse(node) == "torch.float64" for node in attributes)
        if count:
            found[name] = count
    assert found == ON_HOST


@pytest.mark.parametrize("order", [1, -1])
def test_numbers_of_all_dtypes_keep_their_bits(order: int) -> None:
    third, values = torch.tensor(1 / 3, dtype=torch.float64), []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        values += [third.to(dtype), -third.to(dtype)]
    values += [torch.tensor(2**53 + 1), torch.tensor([True]), torch.tensor(float("nan"))]
    values = values[::order]
    read = SingleProcess().read(values)
    assert [repr(number) for number in read] == [repr(float(value.item())) for value in values]


def dtypes(values: Any) -> set[torch.dtype]:
    return {one.dtype for one in tree_leaves(values) if isinstance(one, Tensor)}


class NoFloat64(TorchDispatchMode):
    """As MPS: a conversion of other floats to float64 raises. Tensors of Python numbers are on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.float64 in dtypes(result) and dtypes(args) - {torch.float64, torch.int64}:
            raise TypeError(f"{func}: MPS has no float64")
        return result


@pytest.mark.parametrize(("backend", "clip_grads"), [("sp", True), ("sp", False), ("sp-bf16", False)])
def test_a_run_with_logs_validation_and_checkpoints_needs_no_float64(
    backend: str, clip_grads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_paths, "READS_ON_HOST", False)
    module = Logs(numbers(24), validate=True, scheduler=True, optimizer=torch.optim.AdamW)
    saving = ts.DefaultCheckpointerArguments(every_n_steps=2)
    with NoFloat64():
        trainer = train(
            module,
            tmp_path,
            backend=backend,
            clip_grads=clip_grads,
            log_every=2,
            epochs=2,
            writers=["csv"],
            checkpointer_args=saving,
        )
    assert trainer.history.get_latest_metric("val/loss") > 0


class Logs(Classifier):
    def on_end_train_step(self, global_step: int) -> None:
        self.log("weight", self.net[0].weight.abs().mean())


# --- the current device


@pytest.mark.parametrize("asked", ["cuda:1", 1])
def test_sp_selects_its_device_and_restores_the_previous_one(gpu: PretendedGpu, asked: Any) -> None:
    layer = SingleProcess()
    assert layer.open(asked).device == torch.device("cuda:1")
    assert gpu.index == 1
    layer.open("cuda:0")  # opened again without being closed
    assert gpu.index == 0
    layer.close()
    layer.close()
    assert gpu.index == 0
    assert gpu.calls == [("select", 1), ("select", 0)]


def test_a_device_that_is_refused_and_the_cpu_select_nothing(gpu: PretendedGpu) -> None:
    with pytest.raises(ts.ConfigurationError, match="2 accelerators"):
        SingleProcess().open("cuda:5")
    SingleProcess().open("cpu")
    assert gpu.calls == []


class NotesDevice(Classifier):
    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__(numbers(8))
        self.gpu, self.seen = gpu, list[int]()

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        self.seen.append(self.gpu.index)
        return super().train_step(global_step, batch, device)


def test_two_trainers_on_two_devices_each_work_on_their_own(gpu: PretendedGpu, tmp_path: Path) -> None:
    modules = NotesDevice(gpu), NotesDevice(gpu)
    trainers = [train(module, tmp_path / str(i), device=f"cuda:{i}") for i, module in enumerate(modules)]
    trainers[0].train(epochs=2)
    assert [set(module.seen) for module in modules] == [{0}, {1}]
    trainers[1].close()
    trainers[0].close()
    assert gpu.index == 0


# --- from pinned memory


def refilled(gpu: PretendedGpu, batches: int) -> Iterator[list[Tensor]]:
    """A loader's batches, all in one pinned buffer."""
    buffer = torch.empty(4, 3)
    gpu.pinned.add(buffer.untyped_storage().data_ptr())
    for i in range(batches):
        gpu.calls.append(("fill", i))
        yield [buffer.fill_(float(i)), torch.zeros(4)]


def test_a_copy_from_pinned_memory_ends_before_the_next_batch(gpu: PretendedGpu) -> None:
    for batch in after_copies(refilled(gpu, 3)):
        moved = ts.move_to_device(batch, CUDA)
        assert moved[0].data_ptr() != batch[0].data_ptr()
    upload = [("upload", (4, 3), True), ("record",), ("upload", (4,), True), ("wait",)]
    assert gpu.calls == [call for i in range(3) for call in (("fill", i), *upload)]


def test_memory_that_is_not_pinned_is_not_waited_for(gpu: PretendedGpu) -> None:
    for batch in after_copies(iter([torch.ones(2), torch.ones(2)])):
        ts.move_to_device(batch, CUDA)
    ts.move_to_device(next(refilled(gpu, 1)), CUDA)  # no caller waits for this one
    assert not {("record",), ("wait",)} & set(gpu.calls)


def test_a_closed_loop_no_longer_waits_for_copies(gpu: PretendedGpu) -> None:
    batches = after_copies(refilled(gpu, 3))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    ts.move_to_device(next(refilled(gpu, 1)), CUDA)
    assert ("record",) not in gpu.calls


class Refills(torch.utils.data.IterableDataset[Any]):
    """Ready-made batches in one pinned buffer."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self.gpu = gpu

    def __iter__(self) -> Iterator[Any]:
        buffer, labels = torch.empty(4, FEATURES), torch.zeros(4, dtype=torch.int64)
        self.gpu.pinned.add(buffer.untyped_storage().data_ptr())
        for i in range(4):
            self.gpu.calls.append(("fill", i))
            yield [buffer.fill_(float(i)), labels]


@pytest.mark.parametrize("way", ["own order", "collate_fn", "validation"])
def test_a_run_waits_for_copies_out_of_a_pinned_buffer(gpu: PretendedGpu, tmp_path: Path, way: str) -> None:
    module = Classifier(numbers(16), validate=way == "validation")
    buffer = torch.empty(4, FEATURES)
    gpu.pinned.add(buffer.untyped_storage().data_ptr())

    def collate(rows: Any) -> Any:
        gpu.calls.append(("fill",))
        return [buffer.copy_(torch.stack([x for x, _ in rows])), torch.stack([y for _, y in rows])]

    def loader(sampler: Any, batch_size: int) -> Any:
        if way == "collate_fn":
            dataset = numbers(16)
            return torch.utils.data.DataLoader(dataset, batch_size, sampler=sampler(dataset), collate_fn=collate)
        return torch.utils.data.DataLoader(Refills(gpu), batch_size=None)

    setattr(module, "get_val_dataloaders" if way == "validation" else "get_train_dataloader", loader)
    train(module, tmp_path, device="cuda", train_batch_size=4, val_batch_size=4)
    fills = [i for i, call in enumerate(gpu.calls) if call[0] == "fill"]
    assert len(fills) >= 4
    for begin, end in pairwise(fills):
        between = [call[0] for call in gpu.calls[begin:end]]
        assert "upload" in between
        assert between.index("record") < between.index("wait")
