"""A script for torchrun: all ranks meet, add up, and write their results to a file each."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import trainstack as ts
from tests.helpers.patience import patience


def main(folder: Path, falls: int) -> None:
    place = ts.detect_process_info()
    assert place is not None
    store = ts.rendezvous_store(place, timeout_s=patience(10))
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    total = torch.tensor([float(place.rank + 1)])
    dist.all_reduce(total)
    if place.restarts < falls and place.rank == place.restarts % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    found = {"place": asdict(place), "total": total.item(), "group": asdict(ts.process_info_of_group())}
    (folder / f"{place.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
