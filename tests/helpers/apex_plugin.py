"""A plugin of pytest (`-p tests.helpers.apex_plugin`): the shim, and apex's options for every stack with the layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import apex_shim

apex_shim.install(Path(os.environ["TRAINSTACK_TEST_APEX"]))

from trainstack.backends import apex as layer  # noqa: E402  # the shim comes first

OPTIONS: dict[str, Any] = json.loads(os.environ["TRAINSTACK_TEST_APEX_OPTIONS"])
refuse_second_initialize = layer._check_not_initialized


@pytest.fixture(autouse=True)
def apex_as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each training of a test begins as in a new process, with `OPTIONS` where it names none."""
    made = layer.AmpApex.__init__

    def make(self: Any, inner: Any, **options: Any) -> None:
        made(self, inner, **{**OPTIONS, **options})

    monkeypatch.setattr(layer.AmpApex, "__init__", make)
    monkeypatch.setattr(layer, "_check_not_initialized", lambda amp: apex_shim.forget())
    yield
    apex_shim.forget()
