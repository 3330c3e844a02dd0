"""The encoding of messages between ranks: exact, closed, and safe to decode."""

from __future__ import annotations

import enum
import math
import pickle
import random
import re
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import trainstack as ts
from tests.helpers.workers.wire import Answer, Leaves, Span
from trainstack.backends.processes import communicator
from trainstack.backends.processes.communicator import GroupCommunicator
from trainstack.backends.processes.headers import Header
from trainstack.backends.processes.wire import BLOB_BYTES, At, blob_sizes, decode, decode_packed, encode

SOURCE = Path(ts.__file__).parent


def flat(packed: Any) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def sent(value: Any, **options: Any) -> Any:
    """`value` after a transfer to a rank that has sent a value of the same kind."""
    message = encode(value, **options)
    return decode_packed(flat(message.packed()), message.classes, **options)


class Color(enum.Enum):
    RED = 1


class Text(str):
    pass


class Mapping(dict[str, Any]):
    pass


@dataclass(frozen=True)
class Frozen:
    number: int
    parts: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.number < 0:
            raise AssertionError("no decoder calls this")


class Point(NamedTuple):
    x: Any
    y: Any = 0


VALUES = [
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**2000), 10**5000),
    *(0.0, -0.0, 5e-324, math.inf, -math.inf, 1e308, 1j, complex(math.inf, -0.0)),
    *("", "ä\0\ud800", "x" * 100_000, b"", b"\0\xff", bytearray(b"abc")),
    *([], [[]], [[], ()], (), ((),), {}, {"": {}}, set(), [1.0, 2.0], [1.0, 2], [True, 1.0]),
    *({1, (2, "a")}, frozenset({(1, 2)}), deque([1, 2], 3), deque(), Counter("aab"), OrderedDict(b=1, a=2)),
    *(
        defaultdict(list, a=[1]),
        defaultdict(None, a=1),
        {(1, ("a", None)): 2, None: 3, 1.5: 4, b"k": 5, frozenset(): 6},
    ),
    *(torch.Size([1, 2]), torch.float8_e5m2, torch.device("cuda:1"), Path("/a/ü"), random.Random(3).getstate()),
    *(np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("ab\0"), np.bytes_(b"a\0"), np.complex64(1j)),
    *(np.datetime64("2020-01-01", "ns"), np.timedelta64(3, "D"), np.longdouble(1) / 3),
    *(Span(1, 2), Point([Point(1)], {"a": Span(0, 1)}), Frozen(3, [Frozen(1)])),
]


def id_of(value: Any) -> str:
    """Return a test id that is the same in each process: the text of a set depends on the hash seed."""
    name = type(value).__name__
    return name if isinstance(value, int | set | frozenset) else f"{name} {str(value)[:12]!a}"


@pytest.mark.parametrize("value", VALUES, ids=id_of)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    got = sent(value)

    assert type(got) is type(value)
    assert got == value
    assert repr(got) == repr(value) if not isinstance(value, int) else True


def test_a_float_comes_back_with_all_its_bits() -> None:
    (nan,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_00AB_CDEF))

    for got in (sent(nan), sent([nan, 1.0])[0], sent((nan, None))[0], sent(complex(0, nan)).imag):
        assert struct.pack("<d", got) == struct.pack("<d", nan)
    assert math.copysign(1.0, sent(-0.0)) == -1.0


@pytest.mark.parametrize("large", [False, True])
def test_tensors_of_all_dtypes_keep_their_bits(large: bool) -> None:
    kinds = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    done = 0
    for dtype in sorted(kinds, key=str):
        if str(dtype).removeprefix("torch.").startswith(("q", "bits")) or dtype is torch.complex32:
            continue  # quantized ones have no plain bytes
        source = torch.randint(0, 2, (400 if large else 3, 16 * 20), dtype=torch.uint8)
        try:
            tensor = source.view(dtype)
        except RuntimeError:
            continue
        got = sent({"tensor": tensor})["tensor"]
        assert got.dtype == dtype
        assert got.shape == tensor.shape
        assert torch.equal(got.view(torch.uint8), source)
        done += 1
    assert done >= 20


def test_tensors_in_unusual_states_become_plain_tensors() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for tensor in (
        base.T, base[:, ::2], base[1, 2], base[:0], base.expand(2, 3, 4), base.clone().requires_grad_() * 2,
        nn.Parameter(base), torch.zeros(()), torch.zeros(3, 0, 2), base.bool(),
        torch.view_as_complex(base.reshape(6, 2)).conj(),
        torch.randn(400, 400).T, torch.view_as_complex(base.reshape(6, 2)).conj().imag,
    ):  # fmt: skip
        got = sent([tensor])[0]
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert got.is_contiguous()
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor.detach())
        got.resize_(got.shape)
    with torch.inference_mode():
        assert torch.equal(sent(base * 2), base * 2)


def test_a_message_shares_no_memory_and_repeats_no_tensor() -> None:
    tensor = torch.zeros(300, 300)
    message = encode([tensor, tensor, tensor.detach(), tensor[1:]])

    one, same, view, other = decode_packed(flat(message.packed()))

    assert blob_sizes(message.head) == [360_000, 358_800]
    assert one is same is view
    one += 1
    assert not tensor.any()
    assert not other.any()
    array = np.zeros(20_000)
    got = sent({"a": array, "b": array})
    assert got["a"] is got["b"]
    got["a"] += 1
    assert not array.any()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_keep_layout_and_values() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    doubled = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.ones(2), (2, 2))
    blocks = dense.to_sparse_bsr((1, 1)), dense.to_sparse_bsc((1, 1))
    for tensor in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), *blocks, doubled):
        got = sent(tensor)
        assert got.layout is tensor.layout
        assert torch.equal(got.to_dense(), tensor.to_dense())
    assert not sent(doubled).is_coalesced()
    assert sent(dense.to_sparse().coalesce()).is_coalesced()


def test_arrays_keep_dtype_shape_and_values() -> None:
    base = np.arange(12.0).reshape(3, 4)
    frozen = base.copy()
    frozen.flags.writeable = False
    for array in (
        base, base.T, base[::2, ::-1], frozen, base.astype(">f4"), base.astype("f2"), np.array("text"),
        np.array([b"a", b"bc"]), np.array(["2020", "NaT"], "M8[D]"), np.zeros((0, 3), np.uint16), np.array(1.5),
        np.random.rand(200, 200).T, base.astype(complex),
        np.array(["ä", "bcd"]),
    ):  # fmt: skip
        got = sent((array,))[0]
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()
        assert got.flags.writeable
    state = np.random.RandomState(3).get_state(legacy=False)
    again = np.random.RandomState()
    again.set_state(sent(state))
    assert again.rand() == np.random.RandomState(3).rand()


def test_the_versions_in_a_state_dict_are_kept() -> None:
    state = nn.BatchNorm1d(3).state_dict()

    assert sent(state)._metadata == state._metadata  # type: ignore[attr-defined]


REFUSED: dict[str, Any] = {
    "an enum": Color.RED,
    "a subclass of str": Text("a"),
    "a subclass of dict": Mapping(a=1),
    "an object": Fraction(1, 2),
    "a class": Fraction,
    "a function": len,
    "a lambda": lambda: None,
    "an array of objects": np.array([None]),
    "a structured array": np.zeros(2, "f4,i4"),
    "a tensor without data": torch.zeros(2, device="meta"),
    "a nested tensor": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "a generator of torch": torch.Generator(),
    "a module": nn.Linear(1, 1),
    "an iterator": iter([]),
    "a defaultdict with a function": defaultdict(lambda: 0),
    "an exception": ValueError("x"),
    "a range": range(3),
    "a subclass of Tensor": torch.ones(1).as_subclass(type("Mine", (torch.Tensor,), {})),
    "a masked array": np.ma.masked_array([1.0], [True]),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_values_without_encoding_are_refused_with_place_and_type(what: str) -> None:
    value = REFUSED[what]
    with pytest.raises(ts.ModuleContractError) as raised:
        encode({"a": [1, Point(At("outputs['b']", [value]))]}, "the outputs")

    text = str(raised.value)
    assert text.startswith("outputs['b'][0] is a ")
    assert type(value).__qualname__ in text
    assert "allow_pickle" in text


def test_values_that_contain_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    with pytest.raises(ts.ModuleContractError, match=r"^the value\[0\]\[0\]\[0\]\[0\] is nested deeper"):
        encode(loop)
    deep: Any = 1
    for _ in range(99):
        deep = (deep,)
    assert sent(deep) == deep


def test_classes_are_those_of_the_receiver_and_never_imported() -> None:
    message = encode([Answer("a", torch.ones(2)), Span(1, 2), Frozen(3)])
    message.classes.clear()

    answer, span, frozen = decode_packed(flat(message.packed()))

    assert type(answer) is type(frozen) is SimpleNamespace
    assert (answer.text, answer.score.tolist(), frozen.number) == ("a", [1.0, 1.0], 3)
    assert type(span) is tuple
    other = decode(encode(Span(1, 2)).head, [], {"tests.helpers.workers.wire.Span": Point})
    assert other == (1, 2)
    assert type(other) is tuple, "the class there has other fields"
    assert sent(encode_negative()).number == -1


def encode_negative() -> Any:
    value = Frozen(1)
    object.__setattr__(value, "number", -1)
    return value


def test_pickles_are_read_only_where_that_is_allowed(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    message = encode([Leaves(str(trace))], allow_pickle=True)

    for head in (message.head, pickle.dumps(Leaves(str(trace)))):
        with pytest.raises((ts.ModuleContractError, ts.PeerError), match=r"pickle|not a message"):
            decode(head, [])
    assert not trace.exists()
    decode(message.head, [], allow_pickle=True)
    assert trace.exists()
    assert sent({"half": [Fraction(1, 2), 1.5]}, allow_pickle=True) == {"half": [Fraction(1, 2), 1.5]}
    with pytest.raises(ts.ModuleContractError, match=r"the value\[0\] is a function, which cannot be pickled"):
        encode([lambda: None], allow_pickle=True)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_mutated_messages_raise_errors_of_the_library_alone() -> None:
    """2,000 messages with bytes changed, cut out, doubled or numbers replaced by extremes."""
    draw, outcomes = random.Random(0), Counter[str]()
    seeds = [
        encode(VALUES),
        encode([torch.ones(3, 4), torch.eye(3).to_sparse(), torch.eye(2).to_sparse_csr(), np.eye(2), np.float32(1)]),
    ]
    seeds.append(encode({"a": [1.5, 2.5], "b": (Answer("x", torch.ones(1)), Span(1, 2)), "c": torch.zeros(BLOB_BYTES)}))
    extremes = [struct.pack("<Q", n) for n in (0, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1)]
    for number in range(2000):
        message = seeds[number % 3]
        whole = bytearray(flat(message.packed())[: len(message.head) + 64].numpy().tobytes())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(whole))
            change = draw.randrange(4)
            if change == 0:
                whole[at] = draw.randrange(256)
            elif change == 1:
                del whole[at : at + draw.randint(1, 9)]
            elif change == 2:
                whole[at:at] = whole[at : at + draw.randint(1, 30)]
            else:
                whole[at : at + 8] = draw.choice(extremes)
        try:
            decode(
                bytes(whole),
                [torch.zeros(size, dtype=torch.uint8) for size in blob_sizes(bytes(whole))][:1],
                message.classes,
            )
        except (ts.PeerError, ts.ModuleContractError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["fine"] += 1
    assert outcomes["PeerError"] > 1000, outcomes


def test_a_message_with_a_missing_end_tells_how_much_is_missing() -> None:
    body = b"b" + struct.pack("<Q", 9) + b"1234"
    with pytest.raises(ts.PeerError, match="9 bytes are announced and 4 are left"):
        decode(struct.pack("<QQ", 16 + len(body), 0) + body, [])


def test_a_message_that_announces_more_than_it_has_allocates_nothing() -> None:
    many = struct.pack("<Q", 2**40)
    bodies = [tag + many for tag in (b"s", b"b", b"l", b"t", b"d", b"D", b"e", b"I")]
    bodies += [b"X" + struct.pack("<Q", 5) + b"uint8" + struct.pack("<BQ", 1, 2**40) + b"<" + struct.pack("<Q", 0)]
    bodies += [b"A" + struct.pack("<Q", 3) + b"<f8" + struct.pack("<BQQ", 2, 0, 2**62) + b"<" + many]
    tracemalloc.start()
    for body in bodies:
        with pytest.raises(ts.PeerError):
            decode(struct.pack("<QQ", 16 + len(body), 0) + body, [])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_only_listed_files_use_pickle_and_none_object_collectives() -> None:
    objects = re.compile(r"(all_gather|gather|scatter|send|recv)_object|_object_list\(")
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}

    assert [name for name, text in texts.items() if objects.search(text)] == []
    users = {
        name
        for name, text in texts.items()
        if re.search(r"^\s*(import|from) pickle\b|pickle\.(loads?|dumps?)\(", text, re.M)
    }
    in_memory = (  # copied; hashed; tried and dropped; its errors only
        *("trainer/data/fixed_samples.py", "trainer/resume/optimizer_attributes.py"),
        *("verifying/script_checks/data_checks.py", "cli/predictions.py"),
    )
    assert users == {
        *("backends/processes/wire.py", "launching/options.py", "launching/worker.py", "verifying/trial.py", *in_memory)
    }
    wire = texts["backends/processes/wire.py"]
    assert wire.count("pickle.dumps(") == wire.count("pickle.loads(") == 1


def test_ranks_that_have_made_other_numbers_of_exchanges_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Header]()

    def merge(header: Header, group: Any) -> Header:
        sent.append(header)
        return header

    monkeypatch.setattr(communicator, "merge_headers", merge)
    comm: Any = GroupCommunicator.__new__(GroupCommunicator)
    comm.size, comm._group, comm._num_exchanges = 2, None, 2**32 - 2
    for _ in range(3):
        comm._meet("the value", "gather")
    assert [header.number for header in sent] == [2**32 - 1, 0, 1]
    assert sent[1].merged(sent[2]).apart
