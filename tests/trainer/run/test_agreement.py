"""Ranks compare values that must be equal: before the first step, at saves and at the end."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.processes import run_world
from tests.helpers.workers import agreement
from trainstack.trainer.core.fingerprints import checksums
from trainstack.trainer.data import fixed_samples
from trainstack.trainer.data.fixed_samples import _Contents, copy_dataset
from trainstack.trainer.run.agreement import _arguments

pytestmark = pytest.mark.processes

TWELVE = {
    "seed": "seed is 1 on rank 0 and 2 on rank 1",
    "learning rate": "lr of optimizer 0, group 0 is 0.01 on rank 0 and 0.02 on rank 1",
    "optimizer class": "the class of optimizer 0 is Adam on rank 0 and AdamW on rank 1",
    "betas": "betas of optimizer 0, group 0 is [0.9, 0.999] on rank 0 and [0.8, 0.999] on rank 1",
    "decay": "weight_decay of optimizer 0, group 0 is 0.0 on rank 0 and 0.1 on rank 1",
    "held": "the parameters of optimizer 0, group 0 is net.0.weight, net.0.bias, net.3.weight, net.3.bias on rank 0 and"
    " net.0.weight, net.3.weight on rank 1",
    "clipping": "max_grad_norm is 1.0 on rank 0 and 2.0 on rank 1",
    "length": "the length of the training dataset is 40 on rank 0 and 41 on rank 1",
    "first sample": "sample 0 of the training dataset is",
    "middle sample": "sample 20 of the training dataset is",
    "last sample": "sample 40 of the training dataset is",
    "epochs": "epochs is 1 on rank 0 and 2 on rank 1",
    "batch": "train_batch_size is 8 on rank 0 and 12 on rank 1",
    "one weight": "the checksum of 'net.3.weight' is",
}

VARIANTS = {
    "order of the data": "sample 0 of the training dataset is",
    "numpy dtype": "sample 0 of the training dataset is",
    "class of the data": "the class of the training dataset is TensorDataset on rank 0 and Reordered on rank 1",
    "lambda": "lr_lambdas of scheduler 0 is",
    "scheduler": "the class of scheduler 0 is CosineAnnealingLR on rank 0 and StepLR on rank 1",
    "inner scheduler": "step_size of scheduler 0, _schedulers[0] is 3 on rank 0 and 4 on rank 1",
    "scheduler missing": "initial_lr of optimizer 0, group 0 is 0.1 on rank 0 and missing on rank 1",
    "number in a sample": "['n']['at'][0] of sample 0 of the training dataset is",
    "callback": "the callbacks is none on rank 0 and EMA on rank 1",
    "callback setting": "decay of callback EMA is 0.9 on rank 0 and 0.8 on rank 1",
    "dropout": "part net.2 is Dropout(p=0.0, inplace=False), training=True on rank 0 and Dropout(p=0.1,",
    "dtype": "parameter net.0.weight is (8, 6), float32, requires_grad=True on rank 0 and (8, 6), float64,",
    "requires_grad": "requires_grad=True on rank 0 and (8, 6), float32, requires_grad=False on rank 1",
    "mode": "training=True on rank 0 and Dropout(p=0.0, inplace=False), training=False on rank 1",
    "compile": "compile is True on rank 0 and missing on rank 1. Also different: compile.mode",
    "version": f"the version of trainstack is {ts.__version__!r} on rank 0 and '0.0.1' on rank 1",
    "tf32": "torch's float32 matmul precision is highest on rank 0 and high on rank 1",
    "swapped optimizers": "the class of optimizer 0 is SGD on rank 0 and Adam on rank 1",
    "swapped groups": "the parameters of optimizer 0, group 0 is net.0.weight on rank 0 and net.3.bias on rank 1",
    "tied": "parameter extra.weight is (8, 6), float32, requires_grad=True on rank 0 and (8, 6), float32, "
    "requires_grad=True, the same as net.0.weight on rank 1",
    "buffer missing": "buffer counts is (3,), float32 on rank 0 and missing on rank 1",
    "buffer shape": "buffer counts is (3,), float32 on rank 0 and (4,), float32 on rank 1",
    "hook": "the hooks of the module is none on rank 0 and on_end_train_epoch on rank 1",
    "nested arguments": "checkpointer_args.keep_last is 2 on rank 0 and 3 on rank 1",
    "options": "backend_options.ddp.bucket_cap_mb is 25 on rank 0 and 26 on rank 1",
    "log_every": "log_every is 5 on rank 0 and 6 on rank 1",
    "validate_every": "validate_every is None on rank 0 and cases.<locals>.<lambda>",
    "max_time": "max_time is None on rank 0 and 'a time' on rank 1",
    "resume": "resume is False on rank 0 and 'auto' on rank 1",
    "weight in a hook": "the checksum of 'net.0.bias' is",
    "weight as an epoch begins": "the checksum of 'net.0.bias' is",
    "lr in a hook": "lr of optimizer 0, group 0 is 0.1 on rank 0 and 0.7 on rank 1",
}

ALLOWED = (
    "nothing",
    "folder",
    "checkpoints",
    "displays",
    "fast paths",
    "fast_paths",
    "initial weights",
    "random samples",
    "own generator",
    "own coin",
    "attributes of a scheduler",
    "attributes of schedulers",
    "time that is left",
    "count and other data",
    "paths in samples",
    "module attribute",
    "sparse buffer",
)


@pytest.mark.parametrize("case", [*TWELVE, *VARIANTS])
def test_a_difference_is_named_and_refused_before_the_first_step(tmp_path: Path, case: str) -> None:
    ranks = run_world(2, agreement.differs, directory=str(tmp_path), case=case)

    for rank in ranks:
        assert rank["error"] is not None
        assert rank["error"].startswith("ConfigurationError: ")
        assert {**TWELVE, **VARIANTS}[case] in rank["error"]
        assert rank["steps"] == 0
    assert ranks[0]["error"] == ranks[1]["error"]


@pytest.mark.parametrize("case", ALLOWED)
def test_arguments_that_may_differ_give_the_same_weights(tmp_path: Path, case: str) -> None:
    ranks = run_world(2, agreement.differs, directory=str(tmp_path), case=case)

    assert [rank["error"] for rank in ranks] == [None, None]
    assert ranks[0]["steps"] == ranks[1]["steps"] == 4
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.spec("PMB-18")
def test_initial_values_of_rank_zero_replace_others_with_one_warning(tmp_path: Path) -> None:
    ranks = run_world(2, agreement.differs, directory=str(tmp_path), case="initial weights")
    alike = run_world(2, agreement.differs, directory=str(tmp_path), case="nothing")
    seeded = run_world(2, agreement.differs, directory=str(tmp_path), case="initial weights", other=7)

    said = [[line for line in rank["logged"] if "different initial values" in line] for rank in ranks]
    assert [len(lines) for lines in said] == [1, 0]
    assert said[0][0].startswith(
        "4 of 5 parameters and buffers had different initial values on the ranks: net.0.weight,"
    )
    assert not any("different initial values" in line for line in alike[0]["logged"])
    assert ranks[1]["weights"] == ranks[0]["weights"] == seeded[0]["weights"]


@pytest.mark.parametrize("name", ["resume", "init_weights_from"])
def test_a_checkpoints_folder_may_differ_but_not_its_name(name: str) -> None:
    def texts(path: Any) -> dict[str, str]:
        args = arguments("unused")
        object.__setattr__(args, name, path)
        context = SimpleNamespace(args=args, stack=SimpleNamespace(spec="ddp"))
        return dict(_arguments(cast(Any, context)))

    assert texts("/host0/run/checkpoint-2") == texts(Path("/host1/checkpoint-2"))
    assert texts("/host0/checkpoint-2") != texts("/host0/checkpoint-4")
    assert len({texts(value)[name] for value in (None, False, "auto", "/host0/checkpoint-2")}) == 4


def test_different_initial_values_of_many_tensors_are_sent_together() -> None:
    for rank in run_world(2, agreement.shared_values):
        assert rank == {"differing": 161, "sent": 1, "equal": True}, "40 of the 200 parameters have no elements"


def test_different_samples_of_a_changing_dataset_cause_a_warning(tmp_path: Path) -> None:
    ranks = run_world(2, agreement.differs, directory=str(tmp_path), case="count and other data")
    coins = run_world(2, agreement.differs, directory=str(tmp_path), case="own coin")

    said = [[line for line in rank["logged"] if "its own random numbers" in line] for rank in (*ranks, *coins)]
    assert [len(lines) for lines in said] == [1, 0, 0, 0]
    assert said[0][0].startswith("[0] of sample 0 of the training dataset is ")


@pytest.mark.distributed
def test_the_ranks_that_differ_are_named_among_three(tmp_path: Path) -> None:
    for rank in run_world(3, agreement.differs, directory=str(tmp_path), case="learning rate", other=1):
        assert "lr of optimizer 0, group 0 is 0.01 on ranks 0, 2 and 0.02 on rank 1." in rank["error"]


def test_a_comparison_fetches_no_sample_of_the_users_dataset_itself(tmp_path: Path) -> None:
    ranks = run_world(2, agreement.differs, directory=str(tmp_path), case="own generator")

    assert [rank["fetched"] for rank in ranks] == [21, 20], "41 samples, each once"


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("cancelling", "'net.0.weight' differs on rank 1 from rank 0. No checkpoint was written. Its gradients are"),
        ("swapped", "'net.0.weight' differs on rank 1 from rank 0."),
        ("frozen", "'quarter' differs on rank 1 from rank 0. No checkpoint was written. It does not require gradients"),
        ("sign of zero", "'quarter' differs on rank 1 from rank 0."),
    ],
)
def test_changes_that_cancel_each_other_are_refused_at_a_save(tmp_path: Path, how: str, named: str) -> None:
    for rank in run_world(2, agreement.changed_weights, directory=str(tmp_path), how=how):
        assert rank["error"] is not None
        assert rank["error"].startswith("PeerError: after global step 1 the weights are not the same")
        assert named in rank["error"]
    assert not (tmp_path / "checkpoints").exists() or not ts.list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.parametrize("save", [False, True])
def test_parameters_that_the_module_steps_itself_are_refused_by_name(tmp_path: Path, save: bool) -> None:
    ranks = run_world(2, agreement.gan, directory=str(tmp_path), save=save)

    for rank in ranks:
        assert rank["error"] is not None
        assert "'netD.weight' (and 'netD.bias') differs on rank 1" in rank["error"]
        assert "'netD.weight', 'netD.bias' are in no optimizer of the trainer" in rank["error"]
        assert "their gradients are not summed" in rank["error"]
    said = [line for line in ranks[0]["logged"] if "in no optimizer" in line]
    assert len(said) == 1
    assert "Under ddp their gradients are not summed" in said[0]


@pytest.mark.parametrize("clip", [True, False])
def test_all_ranks_report_the_rank_that_saw_the_loss(tmp_path: Path, clip: bool) -> None:
    first, second = run_world(2, agreement.nonfinite, directory=str(tmp_path), clip=clip)

    assert first["error"] == second["error"]
    place = (
        r"the loss is nan at rank 1, global step 2 \(epoch 0, step 2 of the epoch\), micro-batch 1, with the samples "
    )
    found = re.match(place + r"(\d+), (\d+) of the training data set\.", first["error"])
    assert found is not None, first["error"]
    assert [int(index) for index in found.groups()] == second["samples"]


def test_an_evaluation_uses_noncontiguous_buffers_of_rank_zero() -> None:
    for rank in run_world(2, agreement.buffers_of_rank_zero):
        assert rank["seen"]
        assert all(seen == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] for seen in rank["seen"])
        assert rank["strides"] == [1, 2]


# --- checksums


class Sizes(TorchDispatchMode):
    """Records the bytes of the largest result of an operation, and counts reads of values."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_a_checksum_makes_no_copy_of_a_parameter(layout: str) -> None:
    weight = torch.empty(8192, 8192) if layout == "contiguous" else torch.empty(4096, 2048).t()  # 256 and 32 MiB
    with Sizes() as sizes:
        checksums([weight, torch.ones(3), torch.ones(2, dtype=torch.bfloat16)])

    assert 0 < sizes.largest <= 16 * 2**20
    assert sizes.reads == 0, "only the stacked result is read"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.int8,
        torch.uint16,
        torch.int64,
    ],
)
def test_a_checksum_sees_each_bit_of_each_dtype(dtype: torch.dtype) -> None:
    values = (torch.randn(5, 3) > 0).float().to(dtype)
    other = values.clone()
    other.view(-1).view(torch.uint8)[-1] ^= 1 if dtype is torch.bool else 64
    one, same, changed, empty = checksums([values, values.t().contiguous().t(), other, values[:0]])

    assert one == same
    assert one != changed
    assert empty == 0


def test_a_checksum_depends_on_the_position_across_chunks() -> None:
    values = torch.arange(3 * 2**20, dtype=torch.float32)
    swapped = values.clone()
    swapped[0], swapped[-1] = values[-1], values[0]
    shifted = values.clone()
    shifted[5], shifted[6], shifted[7] = values[5] + 1, values[6] - 2, values[7] + 1
    moved = torch.cat([values[2**20 : 2**21], values[: 2**20], values[2**21 :]])

    assert len(set(checksums([values, swapped, shifted, moved]))) == 4


def test_a_copy_of_a_dataset_shares_data_but_not_state() -> None:
    dataset = agreement.OwnNoise()
    dataset.base = TensorDataset(torch.zeros(41, 2000), torch.zeros(41))
    copy = copy_dataset(dataset)
    before = dataset.rng.bit_generator.state
    copy[3]

    assert dataset.rng.bit_generator.state == before
    assert dataset.fetched == 0
    assert copy.base.tensors[0] is dataset.base.tensors[0]
    assert copy_dataset(type("Locked", (), {"__reduce__": lambda self: 1 / 0})()) is None


def test_a_data_set_of_many_small_containers_is_not_copied() -> None:
    looked = 0

    class Looks(dict[str, int]):
        def __reduce__(self) -> Any:
            nonlocal looked
            looked += 1
            return dict, ()

    assert copy_dataset([[Looks(a=1) for _ in range(900)] for _ in range(100)]) is None
    assert looked < 20_000
    assert copy_dataset([[{"a": 1} for _ in range(900)] for _ in range(3)]) is not None


@pytest.mark.parametrize(("saves", "times"), [(False, 0), (True, 1)])
def test_one_process_fetches_samples_for_checkpoints_only(
    tmp_path: Path, saves: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    monkeypatch.setattr(fixed_samples, "copy_dataset", copies.append)
    saving = ts.DefaultCheckpointerArguments(checkpoint=saves)
    ts.Trainer(Classifier(numbers(8)), arguments(tmp_path, checkpointer_args=saving, max_steps=1)).train()

    assert len(copies) == times


def test_arrays_and_tensors_above_64_kib_are_shared_by_the_copy() -> None:
    class Holds(TensorDataset):
        def __init__(self) -> None:
            super().__init__(*numbers(9).tensors)
            self.kept = [np.zeros(2**16, dtype=np.uint8), torch.zeros(2**16, dtype=torch.uint8)]
            self.shared = [np.zeros(2**16 + 1, dtype=np.uint8), torch.zeros(2**16 + 1, dtype=torch.uint8)]

    data = Holds()
    copied = copy_dataset(data)
    assert [one is other for one, other in zip(copied.kept, data.kept, strict=True)] == [False, False]
    assert [one is other for one, other in zip(copied.shared, data.shared, strict=True)] == [True, True]


def test_comparing_samples_does_not_change_counters_of_the_dataset(tmp_path: Path) -> None:
    class Counting(TensorDataset):
        def __init__(self) -> None:
            super().__init__(*numbers(9).tensors)
            size = fixed_samples.SMALL // 8
            self.counts, self.tensor = np.zeros(size, dtype=int), torch.zeros(size, dtype=torch.int64)

        def __getitem__(self, index: int) -> Any:
            self.counts[index] += 1
            self.tensor[index] += 1
            return super().__getitem__(index)

    saving, data = ts.DefaultCheckpointerArguments(), Counting()
    ts.Trainer(Classifier(data), arguments(tmp_path, checkpointer_args=saving, epochs=1)).train()

    assert data.counts[:9].tolist() == data.tensor[:9].tolist() == [1] * 9


def test_draws_from_each_kind_of_generator_are_detected() -> None:
    for rng in (random.Random(1), np.random.RandomState(1), np.random.default_rng(1), torch.Generator(), [0.0]):
        before = _Contents([rng, torch.zeros(3), np.zeros(3)])
        assert before.equals(_Contents([rng, torch.zeros(3), np.zeros(3)]))
        if isinstance(rng, list):
            rng[0] += 1
        elif isinstance(rng, torch.Generator):
            torch.rand(1, generator=rng)
        else:
            rng.random()
        assert not before.equals(_Contents([rng, torch.zeros(3), np.zeros(3)])), type(rng)
