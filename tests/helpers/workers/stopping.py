"""A run over processes that stop together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers import stop_run
from tests.helpers.workers import RANK


def left_behind(directory: str, **options: Any) -> Any:
    """What `stop_run` leaves in this rank; with "error" where something other than its last step has ended it."""
    error = None
    try:
        stop_run.main(Path(directory), **options)
    except BaseException as ended:
        error = repr(ended)
    left = json.loads(Path(directory, f"{RANK}.json").read_text())
    return left | {"error": error}
