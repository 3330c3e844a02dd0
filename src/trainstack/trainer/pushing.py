"""From a trainer to a hub of models: an export that lies on the disk for a moment only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainstack.checkpointing import push_to_hub
from trainstack.checkpointing.hub import require_hub

if TYPE_CHECKING:
    from trainstack.trainer.saving import Saver


def push(saver: Saver, repo_id: str, options: dict[str, Any]) -> str:
    """Export by `saver` and upload that, on the main process; the URL of the commit on all."""
    require_hub()
    with tempfile.TemporaryDirectory(prefix="trainstack-") as folder:
        path = Path(folder) / repo_id.rpartition("/")[2]
        saver.save_model(path)
        return saver.on_main(lambda: push_to_hub(path, repo_id, **options), f"pushing to {repo_id}")
