"""For the server of the rank pool, which imports this before it forks ranks: they do not wait for the disk."""

from __future__ import annotations

import os

from tests.helpers.quick_disk import fsync

os.fsync = fsync
