"""Importing trainstack: without the garbage collector, which is then as the user had it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.patience import patience

PROBE = """
import gc, sys
import torch
if {disabled}:
    gc.disable()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
import trainstack
at_import = len(collections)
trainstack.Trainer  # imported when it is asked for
print(at_import, len(collections) - at_import, gc.isenabled())
"""


@pytest.mark.processes
@pytest.mark.parametrize("disabled", [False, True])
def test_nothing_is_collected_during_the_imports_and_the_collector_is_as_it_was(disabled: bool) -> None:
    command = [sys.executable, "-c", PROBE.format(disabled=disabled)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(30))
    at_import, at_first_use, enabled = done.stdout.split()
    assert int(at_import) <= 2, "a start and a stop at most: before the block, or after it"
    assert int(at_first_use) <= 2
    assert enabled == str(not disabled)
