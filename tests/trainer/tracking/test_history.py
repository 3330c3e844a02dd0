from __future__ import annotations

import itertools
import json
import math
import struct
import sys
import zlib
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.costs import cpu_s, least
from trainstack.checkpointing.decoding import StateDecoder
from trainstack.checkpointing.encoding import StateEncoder
from trainstack.errors import CheckpointDamagedError, ConfigurationError, ModuleContractError
from trainstack.trainer.tracking.history import MetricColumn, Record, RunHistory
from trainstack.trainer.tracking.record_log import CHUNK


class CountOps(TorchDispatchMode):
    """Counts the aten operators that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("d", value) for value in values]


def same(left: list[float], right: list[float]) -> bool:
    return repr(left) == repr(right)  # repr differs for any two finite floats, -0.0 and 0.0 included; nan equals nan


@pytest.mark.spec("F124")
def test_tensors_are_read_in_one_operation_at_a_flush() -> None:
    history = RunHistory()
    losses = [torch.tensor(0.5 * i, requires_grad=True) * 1 for i in range(100)]
    with CountOps() as recording:
        for step, loss in enumerate(losses):
            history.update_metric("loss", loss, step=step)
    assert set(recording.counts) == {"detach"}
    with CountOps() as reading:
        records = history.flush()
    assert reading.counts["_local_scalar_dense"] == 0
    assert reading.counts["stack"] == 1
    assert [record.value for record in records] == [0.5 * i for i in range(100)]


def test_a_flush_keeps_the_order_across_dtypes_and_numbers() -> None:
    history = RunHistory()
    given_values = [
        torch.tensor(1.5),
        torch.tensor(2, dtype=torch.int64),
        3.25,
        torch.tensor([4.0], dtype=torch.float64),
        torch.tensor(True),
        6,
        torch.tensor([[7.5]], dtype=torch.bfloat16),
        torch.tensor(8.0),
        np.float32(9.5),
    ]
    for step, value in enumerate(given_values):
        history.update_metric("a" if step % 2 else "b", value, step=step, epoch=7)  # type: ignore[arg-type]
    with CountOps() as reading:
        records = history.flush()
    assert reading.counts["stack"] == 5  # float32, int64, float64, bool, bfloat16
    assert [record.value for record in records] == [1.5, 2.0, 3.25, 4.0, 1.0, 6.0, 7.5, 8.0, 9.5]
    assert [record.step for record in records] == list(range(9))
    assert [record.name for record in records] == ["b", "a"] * 4 + ["b"]
    assert {type(record.value) for record in records} == {float}


def test_a_float64_tensor_keeps_all_its_bits() -> None:
    history = RunHistory()
    history.update_metric("x", torch.tensor(0.1, dtype=torch.float64))
    assert history.get_latest_metric("x") == 0.1


def test_recorded_values_keep_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    history = RunHistory()
    loss = weight * 3
    history.update_metric("loss", loss)
    loss.backward()
    assert weight.grad == 3
    history.update_metric("weight", weight[None])
    assert not any(value.requires_grad for _, value, *_ in history._pending if isinstance(value, torch.Tensor))


def test_a_view_is_copied_so_its_base_can_change() -> None:
    history = RunHistory()
    logits = torch.arange(4.0)
    history.update_metric("first", logits[1])
    logits.zero_()
    assert history.flush() == [Record("first", 1.0, 0, 0)]


def test_values_made_in_inference_mode_are_recorded() -> None:
    history = RunHistory()
    normal = torch.tensor(4.0)
    with torch.inference_mode():
        history.update_metric("a", torch.ones(3).sum())
        history.update_metric("a", torch.ones(3)[0])
        history.update_metric("a", normal)
    assert history.get_metric_values("a") == [3.0, 1.0, 4.0]


def test_a_tensor_changed_before_its_flush_is_an_error() -> None:
    history = RunHistory()
    running = torch.zeros(())
    running += 1
    history.update_metric("good", torch.tensor(5.0))
    history.update_metric("running", running, step=3)
    running += 1
    with pytest.raises(ModuleContractError, match=r"metric 'running'.*step 3.*changed in place.*clone\(\)"):
        history.flush()
    assert history.get_metric_values("good") == [5.0]
    assert math.isnan(history.get_latest_metric("running"))
    assert len(history.flush()) == 2  # the error is raised once; an emergency checkpoint can be written


@pytest.mark.spec("PA-37")
def test_flush_returns_each_record_once() -> None:
    history = RunHistory()
    history.update_metric("a", 1.0)
    history.update_metric("b", torch.tensor(2.0))
    assert history.get_latest_metric("a") == 1.0  # reading is not flushing
    assert [record.name for record in history.flush()] == ["a", "b"]
    assert history.flush() == []
    history.update_metric("a", 3.0)
    assert history.flush() == [Record("a", 3.0, 0, 0)]
    assert history.get_metric_values("a") == [1.0, 3.0]


@pytest.mark.spec("PA-37")
def test_step_and_epoch_come_from_the_run_unless_given() -> None:
    history = RunHistory()
    history.current_step, history.current_epoch = 12, 3
    history.update_metric("a", 1.0)
    history.update_metric("a", 2.0, step=5)
    history.update_metric("a", 3.0, epoch=np.int64(9))  # type: ignore[arg-type]
    history.current_step = 13
    history.update_metric("a", 4.0)
    assert history.records("a") == [
        Record("a", 1.0, 12, 3),
        Record("a", 2.0, 5, 3),
        Record("a", 3.0, 12, 9),
        Record("a", 4.0, 13, 3),
    ]


def test_two_values_of_one_step_are_both_kept() -> None:
    history = RunHistory()
    history.update_metric("a", 1.0, step=1)
    history.update_metric("a", torch.tensor(2.0), step=1)
    assert history.get_metric_values("a") == [1.0, 2.0]
    assert [record.value for record in history.flush()] == [1.0, 2.0]


@pytest.mark.spec("PA-37")
def test_the_error_for_a_missing_metric_lists_existing_ones() -> None:
    history = RunHistory()
    assert history.get_metric_names() == set()
    with pytest.raises(ValueError, match="Recorded: nothing yet"):
        history.get_latest_metric("loss")
    history.update_metric("train/loss", 1.0)
    history.update_metric("accuracy", torch.tensor(0.5))
    assert history.get_metric_names() == {"train/loss", "accuracy"}
    for reader in (history.get_latest_metric, history.get_metric_values, history.records):
        with pytest.raises(ConfigurationError, match=r"'train/los'.*Did you mean 'train/loss'.*accuracy"):
            reader("train/los")


@pytest.mark.spec("PA-37")
def test_reset_removes_all_records() -> None:
    history = RunHistory()
    history.current_step = 4
    history.update_metric("a", torch.tensor(1.0))
    history.reset()
    assert history.get_metric_names() == set()
    assert history.flush() == []
    assert (history.current_step, history.current_epoch) == (0, 0)


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "a\x7f", "a\u2028b", "\ud800", 3, None])
def test_a_name_that_would_break_a_log_is_refused(name: Any) -> None:
    history = RunHistory()
    with pytest.raises(ConfigurationError, match="metric"):
        history.update_metric(name, 1.0)
    assert history.get_metric_names() == set()
    assert history.flush() == []


def test_names_may_have_letters_of_any_language() -> None:
    history = RunHistory()
    for name in ("train/loss", "точность", "損失, 平均", 'with "quotes"', "zero\u200cwidth"):
        history.update_metric(name, 1.0)
    assert len(history.flush()) == 5


@pytest.mark.parametrize(
    "value",
    [torch.zeros(3), torch.zeros(0), torch.tensor(1j), "0.5", None, np.zeros(1), 10**400],
    ids=["many", "none", "complex", "str", "None", "array", "too large"],
)
def test_a_value_that_is_not_one_real_number_is_refused(value: Any) -> None:
    history = RunHistory()
    with pytest.raises(ConfigurationError, match="metric 'a' was given"):
        history.update_metric("a", value)
    assert history.get_metric_names() == set()


def test_a_step_that_is_not_whole_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"step=1\.5; give a whole number"):
        RunHistory().update_metric("a", 1.0, step=1.5)  # type: ignore[arg-type]


def stored(state: dict[str, Any]) -> Any:
    """`state` after a checkpoint: through JSON and the bytes of tensors."""
    encoder = StateEncoder()
    tree = json.loads(json.dumps(encoder.encode(state), allow_nan=False))
    return StateDecoder(encoder.pop_tensors()).decode(tree)


def state_of(**changes: Any) -> dict[str, Any]:
    """A state whose records, or whose other entries, are changed."""
    history = RunHistory()
    history.update_metric("a", 1.0)
    state = history.get_state()
    own = {name: changes.pop(name) for name in list(changes) if name in state}
    return state | {"records": state["records"] | changes} | own


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def packed_as(data: bytes) -> dict[str, torch.Tensor]:
    return {"packed": bytes_of(data), "sizes": torch.tensor([len(data)])}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.floats(), st.integers(0, 2**62), st.integers(0, 2**31)),
        max_size=30,
    ),
    st.booleans(),
)
def test_the_state_keeps_every_bit_through_a_checkpoint(
    rows: list[tuple[str, float, int, int]], as_tensors: bool
) -> None:
    history = RunHistory()
    history.current_step, history.current_epoch = 17, 2
    for name, value, step, epoch in rows:
        given_value = torch.tensor(value, dtype=torch.float64) if as_tensors else value
        history.update_metric(name, given_value, step=step, epoch=epoch)
    other = RunHistory()
    other.update_metric("gone", 1.0)
    other.update_state(stored(history.get_state()))
    assert other.get_metric_names() == history.get_metric_names()
    assert (other.current_step, other.current_epoch) == (17, 2)
    for name in history.get_metric_names():
        assert same(other.get_metric_values(name), history.get_metric_values(name))
        finite = [v for v in history.get_metric_values(name) if not math.isnan(v)]
        assert bits([v for v in other.get_metric_values(name) if not math.isnan(v)]) == bits(finite)
        assert [r[2:] for r in other.records(name)] == [r[2:] for r in history.records(name)]
    assert {name: repr(value) for name, value in other.get_state().items()} == {
        name: repr(value) for name, value in history.get_state().items()
    }


def test_inf_and_nan_survive_reading_and_the_state() -> None:
    history = RunHistory()
    for value in (math.inf, -math.inf, math.nan, -0.0):
        history.update_metric("a", torch.tensor(value))
    other = RunHistory()
    other.update_state(history.get_state())
    assert same(other.get_metric_values("a"), [math.inf, -math.inf, math.nan, -0.0])


def test_restored_records_are_not_flushed_again_and_new_ones_are() -> None:
    history = RunHistory()
    history.update_metric("a", 1.0)
    other = RunHistory()
    other.update_state(history.get_state())
    assert other.flush() == []
    other.update_metric("a", 2.0)
    assert other.flush() == [Record("a", 2.0, 0, 0)]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"current_step": 0, "current_epoch": 0, "names": []},
        state_of(names=[]),
        state_of(names=["a", "b"]),
        state_of(names=["a", "a"]),
        state_of(names=["a\n"]),
        state_of(names=5),
        state_of(records=None),
        state_of(metrics=torch.tensor([1], dtype=torch.int32)),
        state_of(metrics=torch.tensor([-1], dtype=torch.int32)),
        state_of(values=torch.zeros(0).double()),
        state_of(values=torch.zeros(1, 1).double()),
        state_of(values=torch.tensor([1.0])),
        state_of(steps=torch.tensor([0.5])),
        state_of(values=[1.0]),
        state_of(current_step=None),
        state_of(sizes=torch.tensor([3])),
        state_of(sizes=torch.tensor([-1]), packed=bytes_of(b"xyz")),
        state_of(sizes=torch.tensor([3]), packed=bytes_of(b"xyz")),
        state_of(**packed_as(zlib.compress(bytes(CHUNK * 28 - 1)))),
        state_of(**packed_as(zlib.compress(bytes(CHUNK * 28 + 1)))),
        state_of(**packed_as(zlib.compress(bytes(CHUNK * 28))[:-1])),
        state_of(**packed_as(zlib.compress(bytes(CHUNK * 28)) + b"0")),
        state_of(**packed_as(zlib.compress(bytes(2**26)))),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    history = RunHistory()
    history.update_metric("kept", 1.0)
    with pytest.raises(CheckpointDamagedError, match="run history is damaged"):
        history.update_state(state)
    assert history.get_metric_values("kept") == [1.0]


@pytest.mark.slow
def test_a_million_records_are_small_and_quick() -> None:
    history = RunHistory()

    def record() -> None:
        history.__init__()  # type: ignore[misc]
        for step in range(1_000_000):
            history.update_metric("loss", 0.5, step=step)

    seconds = least(lambda: cpu_s(record), 10)
    column = history._columns["loss"]
    size = sum(sys.getsizeof(packed) for packed in (column.values, column.steps, column.epochs))
    assert size < 30_000_000
    assert sys.getsizeof(history._arrived) < 10_000_000
    assert seconds < 10  # about 0.5 s
    assert history.get_latest_metric("loss") == 0.5


@pytest.mark.slow
def test_the_state_of_a_million_records_is_small_and_quick() -> None:
    history = RunHistory()
    for step in range(1_000_000):
        history.update_metric("ab"[step % 2], 0.5, step=step)
    assert cpu_s(history.get_state) < 5  # about 0.5 s
    state = history.get_state()
    assert least(lambda: cpu_s(history.get_state), 0.01) < 0.01  # about 0.1 ms: nothing is converted but the last chunk
    other = RunHistory()
    assert least(lambda: cpu_s(lambda: other.update_state(state)), 5) < 5  # about 0.5 s
    assert sum(tensor.nbytes for tensor in state["records"].values()) < 1_000_000
    assert len(json.dumps({name: value for name, value in state.items() if name != "records"})) < 100
    assert other.latest_record("b") == Record("b", 0.5, 999_999, 0)


def test_a_state_converts_only_the_records_since_the_last() -> None:
    """With 24 bytes a record, each save would convert 7.2 MB after 100,000 steps."""
    history = RunHistory()
    for step in range(6 * CHUNK):
        history.update_metric("train/loss", float(np.float32(math.sin(step))), step=step)
        history.update_metric("lr", 1e-3 * (1 + math.cos(step / 1e4)), step=step, epoch=step // 1000)
    before = history.get_state()["records"]
    history.update_metric("lr", 0.0, step=7 * CHUNK)
    after = history.get_state()["records"]

    assert len(before["values"]) < CHUNK
    assert sum(tensor.nbytes for tensor in before.values()) < 10 * 12 * CHUNK
    assert after["packed"].data_ptr() == before["packed"].data_ptr()
    assert len(after["values"]) == len(before["values"]) + 1


def test_all_records_keep_their_order_and_bits() -> None:
    numbers = np.random.default_rng(0)
    values = np.frombuffer(numbers.bytes(8 * 3 * CHUNK), np.float64).tolist()
    rows = [
        Record(f"m{numbers.integers(4)}", value, int(numbers.integers(-5, 2**60)), place // 100)
        for place, value in enumerate(values)
    ]
    history = RunHistory()
    kept = []
    for place, row in enumerate(rows):
        if place % 1000 == 17:  # pending values keep their place
            history.update_metric(
                row.name, torch.tensor(row.value, dtype=torch.float64), step=row.step, epoch=row.epoch
            )
        else:
            history.update_metric(row.name, row.value, step=row.step, epoch=row.epoch)
        if place in (CHUNK - 2, CHUNK - 1, 2 * CHUNK + 5):
            history.flush()
            kept.append((place, history.get_state()))
    history.flush()
    again = RunHistory()
    again.update_state(stored(history.get_state()))

    exact = lambda records: [(r.name, bits([r.value]), r.step, r.epoch) for r in records]  # noqa: E731
    assert exact(history.all_records()) == exact(rows)
    assert exact(again.all_records()) == exact(rows)
    for name in again.get_metric_names():
        assert exact(again.records(name)) == exact(row for row in rows if row.name == name)
    for place, state in kept:  # later records do not change a state
        earlier = RunHistory()
        earlier.update_state(state)
        assert exact(earlier.all_records()) == exact(rows[: place + 1])


MARKS = [(0, 0), (0, 3 * CHUNK), (3, 5), (CHUNK - 1, 5), (CHUNK, CHUNK), (2 * CHUNK + 7, 5)]


@pytest.mark.parametrize(
    ("before", "more"),
    [
        pair if pair in MARKS else pytest.param(*pair, marks=pytest.mark.long)
        for pair in itertools.product((0, 3, CHUNK - 1, CHUNK, 2 * CHUNK + 7), (0, 5, CHUNK, 3 * CHUNK))
    ],
)
def test_records_since_a_mark_can_be_removed(before: int, more: int) -> None:
    history, expected = RunHistory(), RunHistory()
    for place in range(before):
        for one in (history, expected):
            one.update_metric("ab"[place % 2], float(place), step=place)
    mark, kept = history.mark(), history.get_state()
    for place in range(more):
        history.update_metric("bc"[place % 2], -1.0, step=place)
    history.flush() if more == 5 else None
    history.back_to(mark)
    for one in (history, expected):
        one.update_metric("d", 7.0, step=before)

    assert list(history.all_records()) == list(expected.all_records())
    assert history.to_dict() == expected.to_dict()
    assert repr(history.get_state()) == repr(expected.get_state())
    again = RunHistory()
    again.update_state(kept)
    assert list(again.all_records()) == list(expected.all_records())[:-1]
    if more != 5:
        assert history.flush() == expected.flush()


@pytest.mark.spec("PA-37")
def test_readers_may_omit_the_prefix_of_names() -> None:
    history = RunHistory(metric_name_prefix="fold-1/")
    history.update_metric("loss", 1.0)
    history.metric_name_prefix = "fold-2/"
    history.update_metric("loss", 2.0)
    history.update_metric("loss", torch.tensor(3.0))
    assert history.get_metric_names() == {"fold-1/loss", "fold-2/loss"}
    assert history.get_metric_values("loss") == [2.0, 3.0]
    assert history.get_latest_metric("fold-1/loss") == 1.0
    assert [record.name for record in history.flush()] == ["fold-1/loss", "fold-2/loss", "fold-2/loss"]


def test_records_are_available_as_arrays_and_lists() -> None:
    history = RunHistory()
    history.update_metric("loss", torch.tensor(0.5), step=3, epoch=1)
    history.update_metric("loss", 0.25, step=6, epoch=1)
    steps, values = history.arrays("loss")
    assert (steps.dtype, values.dtype) == (np.int64, np.float64)
    assert steps.tolist() == [3, 6]
    assert values.tolist() == [0.5, 0.25]
    history.update_metric("loss", 0.125, step=9)  # the arrays are copies, so the history can still grow
    assert len(steps) == 2
    assert history.to_dict() == {"loss": {"value": [0.5, 0.25, 0.125], "step": [3, 6, 9], "epoch": [1, 1, 0]}}


def test_values_at_a_step_are_the_last_records_there() -> None:
    history = RunHistory()
    history.update_metric("old", 1.0, step=4)
    history.update_metric("twice", 1.0, step=5)
    history.update_metric("twice", torch.tensor(2.0), step=5)
    history.update_metric("later", 1.0, step=5)
    history.update_metric("later", 1.0, step=6)
    assert history.values_at(5) == {"twice": 2.0}
    assert history.values_at(7) == {}


def test_many_metrics_are_restored_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    history, count, calls = RunHistory(), 3 * CHUNK, Counter[int]()
    for number in range(count):
        history.update_metric(f"m/{number % (count // 2)}", number, step=number)
    extend = MetricColumn.extend
    monkeypatch.setattr(MetricColumn, "extend", lambda self, *one: (calls.update([0]), extend(self, *one)))
    restored = RunHistory()
    restored.update_state(history.get_state())
    assert calls[0] <= count
    assert restored.to_dict() == history.to_dict()
    assert list(restored.all_records()) == list(history.all_records())
