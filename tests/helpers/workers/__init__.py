"""Worker functions of distributed tests, by topic: what each process of a case does, and what it returns."""

import os

RANK = int(os.environ.get("RANK", 0))
