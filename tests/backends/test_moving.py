"""Batches of every shape on their way to the device, which is `meta` here."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import trainstack as ts
from trainstack.backends import single_process

META = torch.device("meta")


class WithDefaults(dict[str, Any]):
    """Has a constructor that takes no mapping, and an attribute in addition to the items."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(x=torch.zeros(size))
        self.name = name


class ItsOwnAttributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class LooksUp(dict[str, Any]):
    """Raises KeyError for each missing attribute, `to` among them."""

    __getattr__ = dict.__getitem__


class Boxes(list[Tensor]):
    def __init__(self, size: tuple[int, int], boxes: list[Tensor]) -> None:
        super().__init__(boxes)
        self.size = size


class Message(NamedTuple):
    to: Tensor
    text: str


class MovesItself(dict[str, Tensor]):
    def to(self, device: torch.device) -> str:
        return f"moved itself to {device}"


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    moved = ts.move_to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)

    assert isinstance(moved, PackedSequence)
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_a_container_with_a_to_method_moves_itself() -> None:
    assert ts.move_to_device(MovesItself(x=torch.ones(1)), META) == "moved itself to meta"


ASKS_FOR_STATE = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="copy.copy of Python 3.10 asks a mapping for __getstate__, here as a key"
)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2)},
        OrderedDict(x=torch.ones(2)),
        defaultdict(list, x=torch.ones(2)),
        UserDict(x=torch.ones(2)),
        WithDefaults("train", 2),
        ItsOwnAttributes(x=torch.ones(2)),
        pytest.param(LooksUp(x=torch.ones(2)), marks=ASKS_FOR_STATE),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_mapping_keeps_its_class(batch: Mapping[str, Any]) -> None:
    moved = ts.move_to_device(batch, META)

    assert type(moved) is type(batch)
    assert moved["x"].device.type == "meta"
    assert batch["x"].device.type == "cpu"


def test_attributes_of_a_mapping_are_copied_too() -> None:
    assert ts.move_to_device(WithDefaults("train", 2), META).name == "train"
    assert ts.move_to_device(defaultdict(list), META)["missing"] == []
    assert ts.move_to_device(ItsOwnAttributes(x=torch.ones(2)), META).x.device.type == "meta"


def test_a_subclass_of_list_needs_no_call_of_its_constructor() -> None:
    moved = ts.move_to_device(Boxes((4, 3), [torch.ones(4)]), META)

    assert type(moved) is Boxes
    assert (moved.size, moved[0].device.type) == ((4, 3), "meta")


def test_tuples_keep_their_classes_while_items_move() -> None:
    moved = ts.move_to_device((Message(torch.ones(1), "a"), [torch.ones(1)], torch.Size([2, 3]), None), META)

    assert type(moved) is tuple
    assert (type(moved[0]), moved[0].to.device.type, moved[0].text) == (Message, "meta", "a")
    assert moved[1][0].device.type == "meta"
    assert moved[2:] == (torch.Size([2, 3]), None)


@pytest.mark.parametrize("watched", [0, 1])
@pytest.mark.parametrize("pinned", [False, True])
def test_only_copies_from_pinned_memory_that_a_loop_watches_have_an_event(
    watched: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = single_process._Uploads()
    uploads.watched = watched
    stream = SimpleNamespace(record_event=lambda: "event")
    monkeypatch.setattr(single_process, "_uploads", uploads)
    monkeypatch.setattr(single_process, "_STAGED", ("meta",))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: pinned)

    ts.move_to_device(torch.ones(2), META)

    assert uploads.events == ["event"] * (watched and pinned)
