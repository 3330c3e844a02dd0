"""Worker functions of distributed tests, by topic: each process of a case calls one, and returns its result."""

import os

RANK = int(os.environ.get("RANK", 0))
