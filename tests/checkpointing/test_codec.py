"""A state tree is decoded unchanged, or refused by name."""

from __future__ import annotations

import enum
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpointing.support import same, through_json
from trainstack.checkpointing.encoding import AS_BYTES, NATIVE, StateEncoder
from trainstack.errors import UnsupportedStateError

numbers = st.integers() | st.floats() | st.complex_numbers()
scalars = st.none() | st.booleans() | numbers | st.text() | st.binary()
plain_keys = st.text() | st.just("$type") | st.integers() | st.booleans() | st.none()
keys = plain_keys | st.tuples(plain_keys, st.text())
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=30,
)


@pytest.mark.slow
@given(trees)
def test_any_tree_is_decoded_unchanged(tree: Any) -> None:
    assert same(through_json(tree), tree)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**200),
        -0.0,
        5e-324,
        float("-inf"),
        float("nan"),
        complex(float("nan"), -0.0),
        "\ud800 lone",
        bytearray(b"\x00\xff"),
        {1: "a", 1.5: "b", None: 2, (1, "x"): 3, False: 4},
        {"$type": "tensor", "name": "not one"},
        {"$type": {"$type": "dict"}},
        OrderedDict([("b", 1), ("a", 2)]),
        {1, 2, 3},
        frozenset({("b", 1)}),
        deque([1, 2], maxlen=2),
        Counter({2: 3, 1: 1}),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        Path("some") / "where",
        np.float32(0.1),
        np.bool_(True),
        np.int64(-5),
        np.str_("text\0"),
        np.bytes_(b"text\0"),
        np.datetime64("2026-01-01T00:00:00", "ns"),
        np.arange(6, dtype="float64").reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 3), dtype="int16"),
        np.array(["ab", "c"]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.arange(3, dtype=">i4"),
        np.array([1 + 2j]),
        np.arange(12).reshape(3, 4)[::-1, ::2],
    ],
    ids=repr,
)
def test_a_value_is_decoded_unchanged(value: Any) -> None:
    assert same(through_json({"value": value})["value"], value)


def test_integers_too_long_for_decimal_digits_come_back() -> None:
    assert through_json(-(2**20000)) == -(2**20000)


@pytest.mark.parametrize("factory", [int, float, bool, str, list, tuple, dict, set, deque, Counter, None], ids=str)
def test_a_defaultdict_comes_back_with_its_factory(factory: Any) -> None:
    value = defaultdict(factory, {"a": [1], 6: 2})
    found = through_json({"value": value})["value"]
    assert same(found, value)
    assert found.default_factory is factory


@pytest.mark.parametrize("dtype", [*NATIVE, *AS_BYTES], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_tensor_of_any_dtype_is_decoded_unchanged(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    tensor = (torch.arange(count, dtype=torch.uint8) % 2).view(dtype).reshape(shape)
    assert same(through_json([tensor])[0], tensor)


def test_views_conjugates_and_parameters_come_back_as_plain_tensors() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    conjugate = torch.tensor([1 + 2j]).conj()
    found = through_json({"t": base.T, "e": torch.ones(1).expand(3), "p": parameter, "c": conjugate})
    assert torch.equal(found["t"], base.T)
    assert torch.equal(found["e"], torch.ones(3))
    assert type(found["p"]) is torch.Tensor
    assert not found["p"].requires_grad
    assert torch.equal(found["c"], conjugate)


def test_a_shared_tensor_is_stored_once_and_comes_back_shared() -> None:
    tied = torch.nn.Parameter(torch.ones(2, 2))
    found = through_json({"embed": tied, "head": [tied.detach()]})
    assert found["embed"] is found["head"][0]
    array = np.ones(2)
    first, second = through_json([array, array])
    assert first is second


def test_a_tensor_and_its_conjugate_are_not_the_same() -> None:
    tensor = torch.tensor([1 + 2j])
    plain, conjugate = through_json([tensor, tensor.conj()])
    assert not torch.equal(plain, conjugate)


def test_names_of_tensors_are_the_keys_of_the_state_dict() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    encoder = StateEncoder()
    encoder.encode(model.state_dict(), "module_interface_state")
    assert list(encoder.pop_tensors()) == list(model.state_dict())


def test_names_of_tensors_are_unique_and_never_reserved() -> None:
    encoder = StateEncoder()
    encoder.encode({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "__metadata__": torch.ones(1)}, "x")
    encoder.encode([torch.zeros(2)], "y", "a.b")
    assert list(encoder.pop_tensors()) == ["a.b", "a.b#2", "__metadata__#2", "a.b.0"]


def test_versions_of_modules_survive() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    found = through_json(state)
    assert same(found._metadata, state._metadata)  # type: ignore[attr-defined]


@pytest.mark.spec("F109")
def test_generators_continue_where_they_were() -> None:
    states = through_json([random.getstate(), np.random.get_state(), torch.get_rng_state()])
    bits = through_json(np.random.default_rng(3).bit_generator.state)
    before = [random.random(), np.random.rand(), torch.rand(1).item()]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == before
    generator = np.random.default_rng()
    generator.bit_generator.state = bits
    assert generator.random() == np.random.default_rng(3).random()


@pytest.mark.spec("F109")
def test_states_of_torch_optimizers_and_schedulers_come_back() -> None:
    from torch.optim import lr_scheduler as lr

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    parts: list[Any] = [
        lr.MultiStepLR(optimizer, [2, 2, 5]),
        lr.StepLR(optimizer, 3),
        lr.CosineAnnealingWarmRestarts(optimizer, 4),
        lr.ReduceLROnPlateau(optimizer),
        lr.OneCycleLR(optimizer, 0.1, total_steps=10),
        lr.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [2]),
        lr.LambdaLR(optimizer, lambda epoch: 0.5),
    ]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for part in [optimizer, *parts]:
        state = part.state_dict()
        found = through_json(state)
        assert same(found, state)
        part.load_state_dict(found)


class Colour(enum.IntEnum):
    RED = 1


class OwnDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "object"),
        (Colour.RED, ".value"),
        (OwnDict(a=1), "OwnDict"),
        (namedtuple("Point", "x")(1), "Point"),
        (torch.Generator(), "generator.get_state()"),
        (torch.eye(2).to_mkldnn(), "_mkldnn"),
        (torch.empty(2, device="meta"), "device meta"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
        (np.array([object()]), "dtype object"),
        (np.zeros(1, dtype=[("a", "i4")]), "ndarray"),
        (lambda: 0, "function"),
        (defaultdict(lambda: 0), "defaultdict with a custom factory"),
        (defaultdict(Path), "bool, int, float"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_cannot_be_stored_are_named_with_place(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedStateError) as caught:
        StateEncoder().encode({"optimizers": [{"state": {3: {"foo": value}}}]}, "trainer_state")
    message = str(caught.value)
    assert message.startswith("trainer_state.optimizers[0].state[3].foo contains a ")
    assert words in message
    assert "get_state()" in message


def test_a_quantized_tensor_is_refused_by_name() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedStateError, match=r"state\.q contains a .*quantized"):
        StateEncoder().encode({"q": tensor}, "state")


def test_unusable_keys_and_endless_states_are_refused() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\.a has the key b'x' of type bytes"):
        StateEncoder().encode({"a": {b"x": 1}}, "state")
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        StateEncoder().encode({"loop": endless}, "state")
