"""`import trainstack` runs no garbage collection, and restores the setting of the collector."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.patience import patience

PROBE = """
import gc, os
import torch

def probe(disabled):
    if disabled:
        gc.disable()
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    import trainstack
    at_import = len(collections)
    trainstack.Trainer  # the first use imports it
    print(disabled, at_import, len(collections) - at_import, gc.isenabled(), flush=True)

for disabled in (False, True):
    child = os.fork()  # the import of torch takes most of the time
    if not child:
        probe(disabled)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.processes
def test_imports_run_no_collection_and_restore_the_collector() -> None:
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patience(30))
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [(disabled, enabled) for disabled, _, _, enabled in rows] == [("False", "True"), ("True", "False")]
    for _, at_import, at_first_use, _ in rows:
        assert int(at_import) <= 2, "a start and a stop at most: before or after the imports"
        assert int(at_first_use) <= 2
