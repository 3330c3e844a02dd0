"""`python -m trainstack` runs the command `trainstack`."""

from __future__ import annotations

import sys

from trainstack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
