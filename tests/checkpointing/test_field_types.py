"""JSON objects become dataclasses, or the first field that does not fit is named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from trainstack.checkpointing.field_types import build


@dataclass(frozen=True)
class Record:
    count: int
    kind: Literal["one", "two"]
    seconds: float = 0.5
    name: str | None = None
    sizes: dict[str, list[int]] = field(default_factory=dict)


def test_fields_with_defaults_may_be_absent() -> None:
    assert build(Record, {"count": 1, "kind": "one", "other": []}) == Record(1, "one")
    assert build(Record, {"count": 1}, kind="two") == Record(1, "two")


@pytest.mark.parametrize(
    "body",
    [
        {"count": 2**63 - 1, "kind": "two", "seconds": 1},
        {"count": 0, "kind": "one", "seconds": -1.5, "name": "x"},
        {"count": 0, "kind": "one", "name": None, "sizes": {"a": [], "b": [1, 2]}},
    ],
)
def test_values_of_the_declared_types_are_taken(body: dict[str, Any]) -> None:
    made = build(Record, body)
    assert {name: getattr(made, name) for name in body} == body


@pytest.mark.parametrize("missing", ["count", "kind"])
def test_a_field_without_a_default_must_be_present(missing: str) -> None:
    body = {"count": 1, "kind": "one"}
    del body[missing]
    with pytest.raises(ValueError, match=f"the field '{missing}' is absent"):
        build(Record, body)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("count", text) for text in ("-1", "true", "1.0", '"1"', "null", str(2**63))),
        *(("kind", text) for text in ('"three"', "1", "null", "[]")),
        *(("seconds", text) for text in ("NaN", "Infinity", "-1e400", "true", '"1"', "null", str(10**400))),
        *(("name", text) for text in ("1", "[]", "false")),
        *(("sizes", text) for text in ("[]", "null", '{"a": 1}', '{"a": [-1]}', '{"a": ["1"]}')),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"the field '{name}' is wrong"):
        build(Record, {"count": 1, "kind": "one", name: json.loads(text)})


@pytest.mark.parametrize("body", [[], None, 3, "x"])
def test_only_an_object_has_fields(body: Any) -> None:
    with pytest.raises(ValueError, match=f"it is a {type(body).__name__}, not an object"):
        build(Record, body)
