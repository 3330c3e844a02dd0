"""Tests here save much, and wait for no disk."""

from __future__ import annotations

import pytest

from tests.helpers.quick_disk import replace_fsync

quick_disk = pytest.fixture(scope="module", autouse=True)(replace_fsync)
