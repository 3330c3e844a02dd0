"""Values as JSON has them."""

from __future__ import annotations

import json
from typing import Any


def as_json(values: dict[str, Any]) -> Any:
    """`values` as JSON has them; what it has no word for, such as a writer, by the name of its type."""
    return json.loads(json.dumps(values, default=lambda value: type(value).__name__))
