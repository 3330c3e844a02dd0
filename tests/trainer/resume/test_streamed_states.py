"""States are saved and loaded one tensor at a time, also with failures."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainstack as ts
from tests.helpers.patience import patience
from tests.helpers.processes import run_world
from tests.helpers.workers import streamed
from trainstack._deferred import DeferredTensor, materialized, split
from trainstack.backends.optimizer_state import load_optimizer_state
from trainstack.checkpointing import Checkpoint, read_checkpoint, write_checkpoint
from trainstack.checkpointing.checksums import CHUNK_BYTES
from trainstack.checkpointing.reading import read_deferred
from trainstack.errors import CheckpointDamagedError
from trainstack.trainer.resume.loading import _received, _Sent
from trainstack.trainer.resume.own_states import has_memory_for, update_module

VALUES = torch.arange(12.0).reshape(3, 4)


def deferred() -> DeferredTensor:
    return DeferredTensor([3, 4], torch.float32, VALUES.clone)


def test_each_operation_reads_the_values_and_gives_an_ordinary_tensor() -> None:
    one = deferred()

    assert isinstance(one, Tensor)
    assert (one.shape, one.dtype, one.nbytes) == (VALUES.shape, VALUES.dtype, VALUES.nbytes)
    for made in (one + 0, one.clone(), one.to(torch.float32, copy=True), torch.cat([one]), copy.deepcopy(one)):
        assert type(made) is Tensor
        assert torch.equal(made, VALUES)
    assert torch.equal(pickle.loads(pickle.dumps(one)), VALUES)
    assert one.numpy().tolist() == one.tolist() == VALUES.tolist()
    assert torch.equal(one.rows(1, 3), VALUES[1:])
    with pytest.raises(RuntimeError, match="cannot be written to"):
        one.mul_(2)


def test_a_tensor_that_occurs_several_times_stays_shared() -> None:
    one = deferred()
    tree = {"b": [one, (one, 1)], "a": {"c": one}}

    values = materialized(tree)
    assert values["b"][0] is values["b"][1][0] is values["a"]["c"]  # type: ignore[index]
    outline, tensors = split(tree, lambda tensor: True, lambda number, tensor: number)
    assert outline == {"b": [0, (0, 1)], "a": {"c": 0}}
    assert len(tensors) == 1


def test_received_states_have_the_containers_of_the_sent_ones() -> None:
    one, other = deferred(), deferred()
    outline, tensors = split({"a": [one, (other, 1)], "b": deque([one, 2], 3)}, lambda tensor: True, _Sent.of)

    found = _received(outline, SimpleNamespace(tensors=tensors))  # type: ignore[arg-type]
    assert found["a"][0] is found["b"][0] is one
    assert found["a"][1][0] is other
    assert (type(found["b"]), found["b"][1], found["b"].maxlen) == (deque, 2, 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a tensor of several chunks, a small one, an array, a complex and a sparse one."""
    generator = torch.Generator().manual_seed(0)
    rows = 5 * CHUNK_BYTES // 2 // (4 * 1000)
    state = {
        "large": torch.randn(rows, 1000, generator=generator),
        "small": torch.randn(3, generator=generator),
        "array": torch.randn(40_000, generator=generator).numpy(),
        "complex": torch.randn(9000, dtype=torch.complex128, generator=generator),
        "sparse": torch.randn(200, 200, generator=generator).to_sparse(),
        "shared": [],
    }
    state["shared"] = [state["large"], {"again": state["large"]}]
    return write_checkpoint(Checkpoint(module_interface_state=state, trainer_state={}), tmp_path, "checkpoint-1")


def test_a_deferred_checkpoint_has_the_values_of_one_in_memory(checkpoint: Path) -> None:
    expected, found = (read(checkpoint).module_interface_state for read in (read_checkpoint, read_deferred))

    assert type(found["large"]) is DeferredTensor
    assert type(found["small"]) is Tensor
    assert found["shared"][0] is found["shared"][1]["again"] is found["large"]
    for name in ("large", "small", "complex"):
        assert torch.equal(torch.as_tensor(found[name]) + 0, expected[name])
    assert torch.equal(found["sparse"].to_dense(), expected["sparse"].to_dense())
    assert (found["array"] == expected["array"]).all()


def test_rows_are_read_alone(checkpoint: Path) -> None:
    expected, found = (read(checkpoint).module_interface_state["large"] for read in (read_checkpoint, read_deferred))

    count = len(expected)
    for first, end in ((0, count), (0, 1), (count - 1, count), (5, 5), (1047, 1050), (700, 2200)):
        assert torch.equal(found.rows(first, end), expected[first:end])


@pytest.mark.parametrize("when", ["before", "later"])
def test_damage_is_found_at_opening_and_at_reading(checkpoint: Path, when: str) -> None:
    def damage() -> None:
        with open(checkpoint / "model.safetensors", "r+b") as file:
            file.seek(5 * CHUNK_BYTES // 4)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))

    if when == "before":
        damage()
        with pytest.raises(CheckpointDamagedError, match="tensor 'large', elements"):
            read_deferred(checkpoint)
        return
    large = read_deferred(checkpoint).module_interface_state["large"]
    damage()
    with pytest.raises(CheckpointDamagedError, match="tensor 'large', elements"):
        large.whole()
    assert len(large.rows(0, 3)) == 3  # of another chunk
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamagedError, match="is missing"):
        large.whole()


class _Renames(nn.Linear):
    """Records the types in the argument of `load_state_dict`."""

    seen: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *given: Any) -> None:
        type(self).seen = {type(value) for value in state_dict.values()}
        super()._load_from_state_dict(state_dict, prefix, *given)


@pytest.mark.parametrize("kind", [nn.Linear, _Renames])
def test_code_of_the_user_gets_ordinary_tensors(kind: Any) -> None:
    module = ts.SupervisedModule(kind(4, 3), nn.MSELoss(), "sgd", streamed.DATA)
    update_module(module, {"model.weight": deferred(), "model.bias": torch.ones(3)})

    assert torch.equal(module.model.weight, VALUES)
    assert torch.equal(module.model.bias, torch.ones(3))
    assert DeferredTensor not in (getattr(kind, "seen", None) or ())


class _Sees(torch.optim.AdamW):
    """Records the types in the argument of `load_state_dict`."""

    seen: Any = None

    def load_state_dict(self, state_dict: Any) -> None:
        self.seen = {type(value) for entry in state_dict["state"].values() for value in entry.values()}
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, _Sees])
def test_optimizers_get_separate_ordinary_tensors(kind: Any) -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    optimizer = kind([parameter])
    entry = {"step": torch.tensor(1.0), "exp_avg": deferred(), "exp_avg_sq": deferred()}
    load_optimizer_state(optimizer, {"state": {0: entry}, "param_groups": optimizer.state_dict()["param_groups"]})

    assert getattr(optimizer, "seen", None) in (None, {Tensor})
    for value in optimizer.state[parameter].values():
        assert type(value) is Tensor
    assert torch.equal(optimizer.state[parameter]["exp_avg"], VALUES)


class _Keeps(ts.Callback):
    """Keeps the tensor of its state."""

    value: Tensor | None = None
    loaded: Any = None

    def get_state(self) -> dict[str, Any]:
        return {"value": torch.ones(30_000)}

    def update_state(self, state: Any) -> None:
        self.value = state["value"]

    def on_load_checkpoint(self, trainer: Any, checkpoint: Checkpoint) -> None:
        self.loaded = checkpoint


def test_callbacks_get_ordinary_tensors(tmp_path: Path) -> None:
    streamed.trainer_of(str(tmp_path), "sp", 1, callbacks=[_Keeps()]).train()
    keeps = _Keeps()
    streamed.trainer_of(str(tmp_path), "sp", 2, callbacks=[keeps]).train()

    assert type(keeps.value) is Tensor
    assert {type(one) for one in keeps.loaded.module_interface_state.values()} == {Tensor}


def test_one_process_holds_one_tensor_beyond_its_state(tmp_path: Path) -> None:
    found = streamed.bytes_held(str(tmp_path), "sp")

    assert (found["step"], found["same"]) == (1, True)
    assert found["read"] == 4 * 2 + 4 * 3  # weights twice, moments and averages
    assert found["load"] <= streamed.TENSOR


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("backend", "size"), [("ddp", 2), pytest.param("fsdp", 2, marks=pytest.mark.long), ("fsdp", 3)]
)
def test_ranks_hold_one_tensor_beyond_their_state(backend: str, size: int, tmp_path: Path) -> None:
    ranks = run_world(size, streamed.bytes_held, directory=str(tmp_path), backend=backend)
    for rank, found in enumerate(ranks):
        assert (found["step"], found["same"]) == (1, True)
        assert 0 < found["read"] <= 4 * 2 + 4 * 3
        assert found["load"] <= streamed.TENSOR
        assert found["save"] == (streamed.TENSOR if backend == "fsdp" and not rank else 0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("backend", "size", "how"),
    [
        ("ddp", 2, "file"),
        ("fsdp", 2, "export"),
        pytest.param("ddp", 2, "export", marks=pytest.mark.long),
        pytest.param("fsdp", 2, "file", marks=pytest.mark.long),
        pytest.param("fsdp", 3, "file", marks=pytest.mark.long),
        pytest.param("fsdp", 3, "export", marks=pytest.mark.long),
    ],
)
def test_ranks_that_load_weights_hold_one_additional_tensor(backend: str, size: int, how: str, tmp_path: Path) -> None:
    for found in run_world(size, streamed.started, directory=str(tmp_path), backend=backend, how=how):
        assert found["same"]
        assert found["most"] <= streamed.TENSOR


@pytest.mark.distributed
def test_a_background_save_gathers_one_tensor_at_a_time(tmp_path: Path) -> None:
    ranks = run_world(2, streamed.bytes_held, directory=str(tmp_path), backend="fsdp", async_save=True)
    assert [(found["step"], found["same"], found["save"]) for found in ranks] == [
        (1, True, streamed.TENSOR),
        (1, True, 0),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(("backend", "size", "blind"), [("ddp", 2, [1]), ("fsdp", 3, [1, 2])])
def test_ranks_without_the_files_get_them_from_rank_0(
    backend: str, size: int, blind: list[int], tmp_path: Path
) -> None:
    ranks = run_world(size, streamed.without_files, directory=str(tmp_path), backend=backend, blind=blind)

    for found in ranks:
        assert (found["step"], found["same"], found["left"]) == (2, True, [])
    assert [found["writes"] for found in ranks] == [[False], [True], [False]][:size]  # one file a machine


@pytest.mark.distributed
@pytest.mark.parametrize(("backend", "rank"), [("ddp", 1), ("fsdp", 0)])
def test_a_file_damaged_after_verification_stops_the_run(backend: str, rank: int, tmp_path: Path) -> None:
    ranks = run_world(2, streamed.damaged_later, directory=str(tmp_path), backend=backend, rank=rank)

    assert ranks[rank]["error"].startswith("CheckpointDamagedError: ")
    assert "exp_avg_sq" in ranks[1 - rank]["error"]
    for found in ranks:
        assert (found["step"], found["newest"]) == (0, "checkpoint-000000002")


@pytest.mark.distributed
def test_a_damaged_newest_checkpoint_is_skipped_on_ranks(tmp_path: Path) -> None:
    run_world(2, streamed.finished, directory=str(tmp_path), backend="fsdp", max_steps=2)
    run_world(2, streamed.finished, directory=str(tmp_path), backend="fsdp", max_steps=3)
    file = tmp_path / "checkpoints" / "checkpoint-000000003" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    for found in run_world(2, streamed.finished, directory=str(tmp_path), backend="fsdp", max_steps=4):
        assert found["began"] == 2


@pytest.mark.distributed
@pytest.mark.parametrize(("when", "rank"), [("load", 1), ("save", 0), pytest.param("save", 1, marks=pytest.mark.long)])
def test_a_kill_during_a_load_or_save_loses_nothing(when: str, rank: int, tmp_path: Path) -> None:
    run_world(2, streamed.finished, directory=str(tmp_path), backend="fsdp", max_steps=2)
    options = {"directory": str(tmp_path), "backend": "fsdp", "rank": rank, "when": when}
    ranks = run_world(2, streamed.killed, **options, fresh=True, may_fail=True, timeout=patience(60))
    assert ranks[rank]["exit"] == -9
    assert ranks[1 - rank]["error"].startswith("PeerError: ")

    expected = run_world(2, streamed.finished, directory=str(tmp_path / "whole"), backend="fsdp", max_steps=4)
    found = run_world(2, streamed.finished, directory=str(tmp_path), backend="fsdp", max_steps=4)
    assert [one["began"] for one in found] == [2, 2]
    assert [one["digests"] for one in found] == [one["digests"] for one in expected]


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["save", pytest.param("load", marks=pytest.mark.long)])
def test_files_may_take_longer_than_a_collective(what: str, tmp_path: Path) -> None:
    for found in run_world(2, streamed.slow, directory=str(tmp_path), what=what, seconds=3.5, timeout_s=3.0):
        assert found["step"] == 2


@pytest.mark.distributed
def test_values_are_gathered_to_rank_0_alone(tmp_path: Path) -> None:
    ranks = run_world(3, streamed.gathers_to_main)

    for rank, found in enumerate(ranks):
        everyone = [0, 1, 2] if rank == 0 else [rank]
        assert found["values"] == [everyone, everyone, [{"t": "x" * one} for one in everyone]]
        assert found["large"] == everyone
        assert "object" in found["error"]


class _Marked(Tensor):
    """A subclass without inner tensors."""


def test_values_are_copied_only_into_plain_memory() -> None:
    for target in (torch.zeros(3, 4), nn.Parameter(torch.zeros(3, 4))):
        assert has_memory_for(target, VALUES)
    for target in (
        torch.zeros(3, 4).as_subclass(_Marked),
        torch.zeros(4, 3),
        torch.zeros(3, 4).to_sparse(),
        torch.zeros(3, 4, device="meta"),
    ):
        assert not has_memory_for(target, VALUES)


@pytest.mark.parametrize("others", [1, 3])
def test_state_of_another_number_of_parameters_gets_the_error_of_torch(others: int) -> None:
    def optimizer(count: int) -> torch.optim.Optimizer:
        return torch.optim.Adam([nn.Parameter(torch.ones(2)) for _ in range(count)])

    with pytest.raises(ValueError, match="parameter group that doesn't match the size"):
        load_optimizer_state(optimizer(2), optimizer(others).state_dict())
