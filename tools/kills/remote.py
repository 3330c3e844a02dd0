"""Kill trainings while they upload to an S3 server, continue each on an empty disk, and compare the results.

    python -m tools.kills.remote                     40 SIGKILLs within an upload
    python -m tools.kills.remote --kills 6 --seed 3

The server is that of moto (pip install 'moto[server]' s3fs) on this machine. After each kill the tool downloads and
verifies every checkpoint that the store lists. The exit status is 1 if one is damaged, or if any bit differs at the
end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import trainstack as ts
from tests.helpers.processes import free_port
from tools.kills.__main__ import LATER
from tools.kills.training import BATCH, Heavy
from trainstack.checkpointing.difference import differences
from trainstack.checkpointing.reading import read_states
from trainstack.checkpointing.remote.entries import list_entries
from trainstack.checkpointing.remote.fetching import fetch
from trainstack.checkpointing.remote.store import ObjectStore

BUCKET = "trainstack-kills"
TIMEOUT_S = 180.0
HEAD = "training  kills  half uploaded  begun from steps"


@contextmanager
def s3_server() -> Iterator[str]:
    """A block with a server of moto, an empty bucket, and an environment in which s3fs uses it; yields its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    given = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    before, ends = dict(os.environ), time.monotonic() + 60
    os.environ.update(given, AWS_ENDPOINT_URL=url)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None and time.monotonic() < ends:
            try:
                urlopen(url, timeout=5).close()
                break
            except (URLError, OSError):
                time.sleep(0.05)
        ObjectStore(f"s3://{BUCKET}")._files.mkdir(BUCKET)
        yield url
    finally:
        server.kill()
        server.wait()
        os.environ.clear()
        os.environ.update(before)


def train_logged(address: str, local: str, output: str) -> None:
    """Call `train` in a new process, with the file `output` for its streams."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    train(address, local)


def train(address: str, local: str) -> None:
    """A training of `Heavy` at `address`, saved after every third step."""
    args = ts.TrainerArguments(
        epochs=3,
        train_batch_size=BATCH,
        val_batch_size=100,
        device="cpu",
        backend="sp",
        log_every=10,
        resume="auto",
        output_dir=address,
        local_dir=local,
        checkpointer_args=ts.DefaultCheckpointerArguments(every_n_steps=3, keep_last=2),
        writers=["csv"],
        progress="none",
    )
    ts.seed_everything(0)
    trainer = ts.Trainer(Heavy(), args)
    trainer.train()
    trainer.close()


def damaged(address: str) -> tuple[list[str], int]:
    """Download the checkpoints at `address`; returns their faults, and the number of partially uploaded ones."""
    listing, problems = list_entries(ObjectStore(address)), []
    problems += [str(error) for error in listing.broken.values()]
    with tempfile.TemporaryDirectory() as folder:
        for number, key in enumerate(listing.entries):
            try:
                fetch(f"{address}/{key}", Path(folder, str(number)))
            except ts.CheckpointError as error:
                problems.append(str(error))
    return problems, len({key.rpartition("/")[0] for key in listing.unfinished})


def is_uploading(local: Path) -> bool:
    """Whether an upload is running: the checkpoint has a folder of links then."""
    return any(path.is_dir() for path in local.glob("checkpoints/.tmp-*"))


def kill_once(context: Any, address: str, local: Path, draw: random.Random) -> bool:
    """Train on the empty disk `local` and kill the training within an upload; False if it ended before."""
    process = start(context, address, local)
    uploads, ends = draw.randrange(1, 12), time.monotonic() + TIMEOUT_S
    was = False
    while process.is_alive() and time.monotonic() < ends:
        now = is_uploading(local)
        uploads -= now and not was
        was = now
        if now and uploads <= 0:
            time.sleep(draw.uniform(0.0, 0.1))
            break
        time.sleep(0.0005)
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    if not alive:
        check_ended(process, local)
    return bool(alive)


def start(context: Any, address: str, local: Path) -> Any:
    """Train in a new process."""
    process = context.Process(target=train_logged, args=(address, str(local), f"{local}.txt"))
    process.start()
    return process


def check_ended(process: Any, local: Path) -> None:
    """Wait for the end of a training. Raises RuntimeError with its output if it failed."""
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(Path(f"{local}.txt").read_text()[-3000:])


def train_in(context: Any, address: str, local: Path) -> None:
    """Train to the end in a new process."""
    check_ended(start(context, address, local), local)


def run(kills: int, seed: int) -> bool:
    """Kill trainings `kills` times within an upload; whether none was damaged and all ended with the same bits."""
    draw, root, good = random.Random(seed), Path(tempfile.mkdtemp(prefix="trainstack-remote-")), True
    began, struck, half = time.monotonic(), 0, 0
    with s3_server():
        os.environ["OMP_NUM_THREADS"] = "1"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tools.kills.training", *LATER, "s3fs"])
        train_in(context, f"s3://{BUCKET}/unbroken", root / "unbroken")
        expected = read_states(fetch(f"s3://{BUCKET}/unbroken", root / "expected"))[1]
        print(HEAD, flush=True)
        number = 0
        while struck < kills and good:
            number += 1
            address, here, torn, steps = f"s3://{BUCKET}/run-{number}", 0, 0, []
            most = min(3, kills - struck)
            while True:
                local = root / f"disk-{number}-{here}"
                if here < most:
                    killed = kill_once(context, address, local, draw)
                else:
                    train_in(context, address, local)
                    killed = False
                problems, unfinished = damaged(address)
                good &= not problems
                print(*problems, sep="\n", end="\n" if problems else "")
                shutil.rmtree(local)
                if not killed:
                    break
                here, torn = here + 1, torn + (unfinished > 0)
                newest = [e.info.global_step or 0 for e in list_entries(ObjectStore(address)).entries.values()]
                steps.append(max(newest, default=0))
            found = list(differences(expected, read_states(fetch(address, root / f"end-{number}"))[1]))
            good &= not found
            struck, half = struck + here, half + torn
            words = "the same bits" if not found else f"NOT THE SAME: {found[0]}"
            print(f"{number:>8}  {here:>5}  {torn:>13}  {', '.join(map(str, steps)):<20}  {words}", flush=True)
    print(
        f"{struck} kills, {half} of them with a partially uploaded checkpoint, {time.monotonic() - began:.0f} s: "
        f"{'nothing damaged, the same bits' if good else 'FAILED'}"
    )
    if good:
        shutil.rmtree(root)
    return good


def main(arguments: list[str] | None = None) -> int:
    """Run the battery; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tools.kills.remote", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="kills within an upload (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    given = parser.parse_args(arguments)
    if given.kills < 1:
        parser.error(f"--kills {given.kills}: write 1 or more")
    return 0 if run(given.kills, given.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
