"""Renaming the items of a batch, and calling functions with the items that match their parameters."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstack as ts
from trainstack import apply_mapping, call_with_matching_args

NAMES = st.sampled_from("abcdef")


@dataclass
class Batch:
    words: int
    labels: int


@pytest.mark.spec("FN-15", "FN-16")
@given(items=st.dictionaries(NAMES, st.integers()), mapping=st.dictionaries(NAMES, NAMES))
def test_a_dict_renames_items_and_keeps_the_others(items: dict[str, int], mapping: dict[str, str]) -> None:
    before, wanted = dict(items), [mapping.get(name, name) for name in items]
    if len(set(wanted)) < len(wanted):
        with pytest.raises(ts.ModuleContractError, match="makes two items"):
            apply_mapping(mapping, items)
    else:
        assert apply_mapping(mapping, items) == dict(zip(wanted, items.values(), strict=True))
    assert items == before


@pytest.mark.spec("FN-15")
def test_names_may_be_swapped() -> None:
    assert apply_mapping({"a": "b", "b": "a"}, {"a": 1, "b": 2}) == {"b": 1, "a": 2}


@pytest.mark.spec("FN-15", "FN-16")
def test_dataclasses_mappings_and_sequences_become_dicts() -> None:
    assert apply_mapping({"words": "x"}, Batch(1, 2)) == {"x": 1, "labels": 2}
    assert apply_mapping({"words": "x"}, OrderedDict(words=1)) == {"x": 1}
    assert apply_mapping({"_0": "x"}, (1, 2)) == apply_mapping({"_0": "x"}, [1, 2]) == {"x": 1, "_1": 2}


@pytest.mark.spec("FN-15", "FN-16")
def test_a_function_maps_any_value_and_none_changes_nothing() -> None:
    value = object()

    assert apply_mapping(lambda batch: [batch], value) == [value]
    assert apply_mapping(None, value) is value


@pytest.mark.spec("FN-15")
def test_values_without_names_are_refused() -> None:
    with pytest.raises(ts.ModuleContractError, match=r"names cannot be mapped in a Tensor\. Use a function"):
        apply_mapping({"a": "b"}, torch.zeros(2))


def area(width: int, height: int = 2) -> int:
    return width * height


class Box(nn.Module):
    def forward(self, width: int, height: int = 2) -> int:
        return width * height


@pytest.mark.spec("FN-17")
@pytest.mark.parametrize("function", [area, Box(), Box().forward, lambda width, height=2: width * height])
def test_a_function_gets_its_parameters_from_all_sources(function: Any) -> None:
    assert call_with_matching_args(function, {"width": 3, "depth": 9}) == 6
    assert call_with_matching_args(function, {"depth": 9, "height": 5}, {"width": 3}) == 15


@pytest.mark.spec("FN-17")
def test_keyword_parameters_get_all_items() -> None:
    def rest(width: int, **others: int) -> Any:
        return width, others

    assert call_with_matching_args(rest, {"width": 1, "a": 2}, {"b": 3}) == (1, {"a": 2, "b": 3})


@pytest.mark.spec("FN-17")
def test_keyword_only_parameters_and_partial_objects_are_matched() -> None:
    def only(*, width: int) -> int:
        return width

    assert call_with_matching_args(only, {"width": 1}) == 1
    assert call_with_matching_args(functools.partial(area, height=7), {"width": 2}) == 14


@pytest.mark.spec("FN-17")
def test_the_error_lists_missing_and_available_arguments() -> None:
    with pytest.raises(
        ts.ModuleContractError,
        match=r"area requires 'width'. The available names are \['depth', 'height'\] and \['label'\]",
    ):
        call_with_matching_args(area, {"height": 1, "depth": 2}, {"label": 3})


@pytest.mark.spec("FN-17")
def test_a_parameter_with_values_from_two_sources_is_refused() -> None:
    assert call_with_matching_args(area, {"width": 1, "depth": 1}, {"depth": 2}) == 2
    with pytest.raises(ts.ModuleContractError, match=r"area takes 'width', and two sources have it"):
        call_with_matching_args(area, {"width": 1}, {"width": 2})

    with pytest.raises(ts.ModuleContractError, match="two sources have it"):
        call_with_matching_args(lambda **all_of_them: None, {"a": 1}, {"a": 2})
    same = object()
    assert call_with_matching_args(lambda a: a, {"a": same}, {"a": same}) is same


@pytest.mark.spec("FN-17")
@pytest.mark.parametrize("function", [lambda *items: items, lambda width, /: width])
def test_parameters_without_names_are_refused(function: Any) -> None:
    with pytest.raises(ts.ModuleContractError, match="by position only, so names cannot be matched"):
        call_with_matching_args(function, {"width": 1})


@pytest.mark.spec("FN-17")
def test_a_signature_is_read_once_for_each_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Module):
        def forward(self, width: int) -> int:
            return width

    read, original = [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function, **kw: read.append(function) or original(function, **kw))
    for _ in range(3):
        assert call_with_matching_args(Other(), {"width": 4, "height": 5}) == 4

    assert len(read) == 1
    with pytest.raises(ts.ModuleContractError, match="forward requires 'self'"):
        call_with_matching_args(Other.forward, {"width": 4})


@pytest.mark.spec("FN-17")
def test_a_compiled_model_has_the_signature_of_its_original() -> None:
    compiled = torch.compile(Box(), backend="eager")

    assert call_with_matching_args(compiled, {"width": 3, "depth": 9}) == 6
