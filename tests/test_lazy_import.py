"""`import trainstack` runs no garbage collection, and restores the setting of the collector."""

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
trainstack.Trainer  # the first use imports it
print(at_import, len(collections) - at_import, gc.isenabled())
"""


@pytest.mark.processes
@pytest.mark.parametrize("disabled", [False, True])
def test_imports_run_no_collection_and_restore_the_collector(disabled: bool) -> None:
    command = [sys.executable, "-c", PROBE.format(disabled=disabled)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(30))
    at_import, at_first_use, enabled = done.stdout.split()
    assert int(at_import) <= 2, "a start and a stop at most: before or after the imports"
    assert int(at_first_use) <= 2
    assert enabled == str(not disabled)
