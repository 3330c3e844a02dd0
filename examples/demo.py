"""The features of trainstack in half a minute: kill and resume, replay, two processes, private training.

    python examples/demo.py                 (or: make demo)

Everything runs on the CPU. The data are the 1,797 handwritten digits of scikit-learn. The scripts to copy are
digits.py, ddp.py, replay.py and private_digits.py, next to this file.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from trainstack import (
    Callback,
    DefaultCheckpointerArguments,
    DifferentialPrivacyArguments,
    SupervisedModule,
    Trainer,
    TrainerArguments,
    launch,
    replay,
    seed_everything,
)

RUNS = ("unbroken", "killed", "ddp", "private")  # folders in the output folder
SAVE_EVERY = 20  # global steps


class ShiftedDigits(Dataset):
    """Images that move by up to one pixel, in another direction in each epoch."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll(shift, (1, 2)), self.labels[index]


class Digits(SupervisedModule):
    """A small convolutional network on the digits in `file`, see `write_digits`."""

    def __init__(self, file):
        images, labels = torch.load(file)
        layers = (nn.Conv2d(1, 24, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        super().__init__(
            nn.Sequential(*layers, nn.Linear(24 * 4 * 4, 10)),
            nn.CrossEntropyLoss(),
            "adamw",
            ShiftedDigits(images[:1437], labels[:1437]),
            TensorDataset(images[1437:], labels[1437:]),
            optimizer_kwargs={"lr": 1e-2},
        )

    def on_end_val_epoch(self, global_step, results, key="default"):
        self.log("val/accuracy", (results["outputs"].argmax(dim=1) == results["targets"]).float().mean())


class PrintSteps(Callback):
    """Prints the number of each step, so that another process can kill this one in a certain step."""

    def on_train_step_end(self, trainer, step):
        print("step", step, flush=True)


class Result(NamedTuple):
    """The end of a training."""

    accuracies: list[float]  # after each epoch
    loss: float  # of the validation
    steps: int
    weights: dict[str, torch.Tensor]


def write_digits(file):
    """Write the digits as tensors: images (1797, 1, 8, 8) from 0 to 1, and labels.

    The other processes read this file: they start without the import of scikit-learn, which takes a second.
    """
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    torch.save((images[order], torch.tensor(data.target)[order]), file)


def train(folder, run, epochs, backend="sp", callbacks=()):
    """Train the digits, from the newest checkpoint of the run on if there is one; returns a `Result`."""
    seed_everything(0)
    args = TrainerArguments(
        backend=backend,
        epochs=epochs,
        train_batch_size=64,
        val_batch_size=360,
        device="cpu",
        output_dir=folder / run,
        resume="auto",
        log_level="WARNING",
        writers=["csv"],
        progress="none",
        checkpointer_args=DefaultCheckpointerArguments(every_n_steps=SAVE_EVERY, keep_last=None),
    )
    trainer = Trainer(Digits(folder / "digits.pt"), args, callbacks=callbacks)
    trainer.train()
    accuracies, losses = (trainer.history.get_metric_values(name) for name in ("val/accuracy", "val/loss"))
    result = Result(accuracies, losses[-1], trainer.plan.total_steps, trainer.module.state_dict())
    trainer.close()
    return result


def hash_of(weights):
    """The first 16 digits of a SHA-256 over all bits of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


@contextmanager
def part(title):
    """A part of the tour: prints its title before and its seconds after it."""
    began = time.perf_counter()
    print(f"\n{title}", flush=True)
    yield
    print(f"   {'time':<10} {time.perf_counter() - began:.1f} s", flush=True)


def row(name, text):
    """Print one line of a part."""
    print(f"   {name:<10} {text}", flush=True)


def percent(share):
    """0.9611 as "96 %"."""
    return f"{100 * share:.0f} %"


def train_once(folder, epochs):
    """Part 1; returns the result."""
    with part("1. Train: a small network on 1,437 images of handwritten digits"):
        result = train(folder, "unbroken", epochs)
        row("accuracy", ", ".join(map(percent, result.accuracies)) + " after each epoch, on 360 other images")
        row("weights", f"{hash_of(result.weights)} (hash of all bits) after {result.steps} steps")
    return result


def training_process(folder, epochs):
    """Start this script in a new process, where it trains the run `killed` and prints its steps."""
    command = [sys.executable, __file__, "--epochs", str(epochs), "--output-dir", str(folder), "--train"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def kill_and_resume(folder, epochs, unbroken):
    """Part 2; returns whether the weights are those of the unbroken training."""
    with part("2. Kill and resume: the same training in a new process"):
        last = unbroken.steps // 2 + 3
        with training_process(folder, epochs) as process:
            assert process.stdout
            for line in process.stdout:
                if line == f"step {last}\n":
                    process.kill()  # SIGKILL, which no process can catch
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"It ended before step {last} with exit status {process.returncode}. Try more --epochs.")
        row("killed", f"process {process.pid} by SIGKILL in step {last}, or a few steps later")
        with training_process(folder, epochs) as process:
            printed = process.communicate()[0].splitlines()
        if process.returncode != 0:
            raise SystemExit(f"The resumed training failed with exit status {process.returncode}.")
        first, weights = int(printed[0].removeprefix("step ")), printed[-1]
        row("resumed", f"process {process.pid} from the checkpoint of step {first - 1}")
        same_weights = weights == hash_of(unbroken.weights)
        same_metrics = len({(folder / run / "metrics.csv").read_bytes() for run in ("unbroken", "killed")}) == 1
        row("weights", f"{weights}, {'the same bits' if same_weights else 'NOT THE SAME'}")
        row("metrics", f"metrics.csv has {'the same bytes' if same_metrics else 'NOT THE SAME bytes'}")
    return same_weights and same_metrics


def replay_steps(folder, unbroken):
    """Part 3; returns whether the replayed steps have the recorded bits."""
    with part("3. Replay: make the last steps of the first training again from a checkpoint, and compare the bits"):
        first = (unbroken.steps - 1) // SAVE_EVERY * SAVE_EVERY + 1 - SAVE_EVERY
        make_module = partial(Digits, folder / "digits.pt")
        report = replay(make_module, folder / "unbroken", from_step=max(1, first), quiet=True)
        row("verdict", report.verdict.partition(" (")[0])
        row("compared", "loss, gradient norm, learning rate and samples of each step; weights and all other state")
        row("", f"at the checkpoints of steps {', '.join(map(str, report.checkpoints))}")
    return report.same


def two_processes(folder, epochs, unbroken):
    """Part 4; returns whether the loss is that of one process."""
    with part('4. Two processes: the same training with backend="ddp", half of each batch in each process'):
        result, _ = launch(train, folder, "ddp", epochs, "ddp", nproc=2, env={"OMP_NUM_THREADS": "1"})
        row("accuracy", percent(result.accuracies[-1]))
        row("val/loss", f"{result.loss:.6f} with two processes, {unbroken.loss:.6f} with one")
    return abs(result.loss - unbroken.loss) < 1e-3


def train_privately(folder):
    """Part 5: a linear model on fixed features, see private_digits.py."""
    from private_digits import Digits as PrivateDigits

    with part('5. Private training: backend="sp-dp" with a budget of epsilon 3'):
        args = TrainerArguments(
            backend="sp-dp",
            differential_privacy_args=DifferentialPrivacyArguments(
                target_epsilon=3, delta=1e-4, per_sample_max_grad_norm=0.5, accountant="rdp"
            ),
            epochs=12,
            train_batch_size=512,
            val_batch_size=360,
            validate_every=0,
            device="cpu",
            output_dir=folder / "private",
            log_level="WARNING",
            writers=["csv"],
            progress="none",
            checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),
        )
        trainer = Trainer(PrivateDigits(), args)
        trainer.train()
        statement = trainer.privacy_statement()
        row("accuracy", percent(trainer.validate().metrics["val/accuracy"]))
        row("privacy", f"epsilon {statement.epsilon:.3f} at delta {statement.delta:g}, for each of the 1,437 images")


def main():
    """Run the tour."""
    parser = argparse.ArgumentParser(description="Shows the features of trainstack in half a minute.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="default: runs/demo")
    parser.add_argument("--train", action="store_true", help="only train the run of part 2, and print its steps")
    given = parser.parse_args()
    if given.epochs < 2:
        parser.error(f"--epochs {given.epochs}: write 2 or more, so that a checkpoint precedes the kill")
    folder, began = given.output_dir, time.perf_counter()
    torch.set_num_threads(1)  # in all processes: the network is too small for more
    if given.train:
        print(hash_of(train(folder, "killed", given.epochs, callbacks=[PrintSteps()]).weights))
        return 0

    print("Shows a training, a kill and an exact resume, a replay, two processes, and a private training.", flush=True)
    for run in RUNS:
        shutil.rmtree(folder / run, ignore_errors=True)  # of an earlier tour
    folder.mkdir(parents=True, exist_ok=True)
    write_digits(folder / "digits.pt")
    unbroken = train_once(folder, given.epochs)
    same = [
        kill_and_resume(folder, given.epochs, unbroken),
        replay_steps(folder, unbroken),
        two_processes(folder, given.epochs, unbroken),
    ]
    train_privately(folder)
    print(
        f"\n{time.perf_counter() - began:.0f} s in all. The runs are in {folder}, each with a report.html. Read next:"
    )
    print("   examples/digits.py     the training as a script to copy: docs/examples/digits.md explains it")
    print("   docs/quickstart.md     train, resume, validate, export: your first training in ten minutes")
    print("   docs/replay.md         the quantities of a replay, and the limits of the proof")
    print("   docs/privacy.md        private training, and the meaning of epsilon")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
