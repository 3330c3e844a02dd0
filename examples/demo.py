"""The tour: one module on three backends, then a training that is killed half-way and goes on as if it had not been.

    python examples/demo.py                 (or: make demo)
    python examples/demo.py --epochs 3      (shorter)

The module is the one in digits.py, next to this file. Everything runs on the CPU, so it looks the same everywhere.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from curves import draw_curves
from digits import fingerprint, train

from trainstack import explain, list_checkpoints

BACKENDS = ("sp", "sp-bf16", "sp-amp")
DIGITS = Path(__file__).with_name("digits.py")
SAVED_EVERY = 10  # global steps; see digits.train


def compare_backends(epochs, folder):
    """Train the same module once on each backend and print a table; returns the trainers by backend."""
    print(f"1. One module, three backends: {epochs} epochs each on the CPU\n")
    print("   backend    validation accuracy    loss      time    weights")
    train("sp", 1, folder / "warm-up", device="cpu", writers=[], progress="none", max_train_steps_per_epoch=1)
    shutil.rmtree(folder / "warm-up")  # it was only there to keep torch's late imports out of the times below
    trainers = {}
    for backend in BACKENDS:
        began = time.perf_counter()
        trainer = train(backend, epochs, folder / backend, device="cpu", writers=["csv"], progress="none")
        seconds = time.perf_counter() - began
        accuracy, loss = (trainer.history.get_latest_metric(name) for name in ("val/accuracy", "val/loss"))
        print(f"   {backend:<10} {accuracy:>15.1%} {loss:>13.4f} {seconds:>7.1f} s    {fingerprint(trainer.module)}")
        trainers[backend] = trainer
    print("\n   Half precision saves time on GPUs; a CPU may well be slower with it. What 'sp-amp' does:\n")
    print("\n".join(f"   | {line}".rstrip() for line in explain("sp-amp").splitlines()))
    return trainers


def start(epochs, folder, *more):
    """Start digits.py in a process of its own; what it prints goes into a file."""
    command = [sys.executable, str(DIGITS), "--epochs", str(epochs), "--output-dir", str(folder), "--device", "cpu"]
    with (folder / "output.txt").open("a") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*command, *more], stdout=output, stderr=subprocess.STDOUT, env=environment)


def checkpointed_steps(folder):
    """The global steps of the checkpoints in `folder`, newest last. A checkpoint is complete or it is not there."""
    place = folder / "checkpoints"
    found = list_checkpoints(place) if place.is_dir() else []
    return [info.global_step for info in found if info.kind == "checkpoint"]


def kill_at(step, child, folder):
    """Kill `child` with SIGKILL, which no process can catch, once the checkpoint of `step` is there."""
    deadline = time.monotonic() + 120
    try:
        while step not in checkpointed_steps(folder):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the training did not reach step {step}; see {folder / 'output.txt'}")
            time.sleep(0.002)
    finally:
        child.kill()
        child.wait()
    if child.returncode == 0:
        raise SystemExit("the training was over before it could be killed; give it more --epochs")


def within_an_epoch(plan):
    """The checkpointed step nearest to the middle of the middle epoch."""
    middle = plan.steps_per_epoch * (plan.epochs // 2 + 0.5)
    return min(range(SAVED_EVERY, plan.total_steps, SAVED_EVERY), key=lambda step: abs(step - middle))


def line_that_begins(word, text):
    """The rest of the last line of `text` that begins with `word`."""
    return next(line.removeprefix(word).strip() for line in reversed(text.splitlines()) if line.startswith(word))


def kill_and_resume(unbroken, epochs, folder):
    """Train in another process, kill it, resume in a third one, and compare; returns (step, all is equal)."""
    plan = unbroken.plan
    print("\n2. Killed half-way and resumed; shuffling, dropout and random shifts of the images are on\n")
    folder.mkdir(parents=True)
    child = start(epochs, folder)
    kill_at(within_an_epoch(plan), child, folder)
    step = checkpointed_steps(folder)[-1]
    epoch, within = divmod(step, plan.steps_per_epoch)
    print(f"   process {child.pid} was training and got SIGKILL. Its newest checkpoint is that of step {step} of")
    print(f"   {plan.total_steps}, which is step {within} of {plan.steps_per_epoch} in epoch {epoch + 1}.")
    child = start(epochs, folder, "--resume")
    try:
        if child.wait(timeout=120) != 0:
            raise SystemExit(f"the resumed training failed; see {folder / 'output.txt'}")
    finally:
        child.kill()
        child.wait()
    said = (folder / "output.txt").read_text()
    print(f"   process {child.pid} says 'resumed {line_that_begins('resumed', said)}', and trained to the end.\n")

    resumed = line_that_begins("weights", said)
    wanted = fingerprint(unbroken.module)
    logs = [(path / "metrics.csv").read_bytes() for path in (folder.parent / "sp", folder)]
    print(f"   unbroken run         weights {wanted}")
    print(f"   killed and resumed   weights {resumed}")
    print(f"   The weights are {'the same bits' if resumed == wanted else 'NOT THE SAME'}.")
    print(f"   The metrics files are {'the same bytes' if logs[0] == logs[1] else 'NOT THE SAME'}.")
    return step, resumed == wanted and logs[0] == logs[1]


def main():
    """Run the tour."""
    parser = argparse.ArgumentParser(description="Three backends, then a killed and resumed training.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error(f"--epochs {given.epochs}: write 1 or more")

    torch.set_num_threads(1)  # as in the processes that are started; the model is too small for more
    folder, began = given.output_dir, time.perf_counter()
    for name in (*BACKENDS, "warm-up", "interrupted"):  # what an earlier tour left there, and nothing else
        shutil.rmtree(folder / name, ignore_errors=True)
    trainers = compare_backends(given.epochs, folder)
    step, equal = kill_and_resume(trainers["sp"], given.epochs, folder / "interrupted")
    picture = draw_curves(folder, BACKENDS, step)
    print(f"\n3. Curves, drawn from each run's metrics.csv: {picture}\n\n   {time.perf_counter() - began:.0f} s in all")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
