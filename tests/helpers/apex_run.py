"""`resume_run` on apex's own code: the same run in a process with the shim; `OPTIONS` come through the environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.helpers import apex_plugin, apex_shim
from tests.helpers.apex_plugin import OPTIONS, layer
from tests.helpers.resume_run import main

if __name__ == "__main__":
    made = layer.AmpApex.__init__

    def make(self: Any, inner: Any, **options: Any) -> None:
        made(self, inner, **{**OPTIONS, **options})

    layer.AmpApex.__init__ = make  # type: ignore[method-assign]
    if sys.argv[1] != "unbroken":  # many runs in one process
        layer._check_not_initialized = lambda amp: apex_shim.forget()
    assert apex_plugin.OPTIONS
    main(sys.argv[1], Path(sys.argv[2]), "sp-amp-apex", 0)
