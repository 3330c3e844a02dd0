"""Runs on the S3 server of moto, with a SIGKILL during an upload."""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import shutil
from pathlib import Path

import pytest
import torch

import trainstack as ts
from trainstack.checkpointing import fetch, read_checkpoint
from trainstack.checkpointing.remote.store import ObjectStore

MISSING = [name for name in ("s3fs", "moto", "flask") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install s3fs 'moto[server]')"),
    pytest.mark.processes,
    pytest.mark.slow,
]


def test_a_run_continues_elsewhere_after_a_killed_upload(tmp_path: Path) -> None:
    from tools.kills import remote

    with remote.s3_server():
        store = ObjectStore(f"s3://{remote.BUCKET}/check")
        assert store.put_new("one", b"1")
        assert not store.put_new("one", b"2")
        context, runs = multiprocessing.get_context("spawn"), ("s3://trainstack-kills/a", "s3://trainstack-kills/b")
        assert remote.kill_once(context, runs[0], tmp_path / "lost", random.Random(3))
        shutil.rmtree(tmp_path / "lost")
        assert remote.damaged(runs[0])[0] == []
        for run in runs:
            remote.train_in(context, run, tmp_path / run[-1])
            assert ts.TrainerArguments.from_yaml(f"{run}/config.yaml").output_dir == run
        states = [read_checkpoint(fetch(run, tmp_path / "ends" / run[-1])) for run in runs]
        one, other = (state.module_interface_state or {} for state in states)
        assert all(torch.equal(one[name], other[name]) for name in one)
        with pytest.raises(ts.CheckpointError, match="bucket does not exist"):
            remote.train("s3://no-such-bucket/run", str(tmp_path / "none"))
