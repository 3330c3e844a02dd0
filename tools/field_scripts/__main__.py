"""Run public training scripts as plain loops and as ports to trainstack, and compare the final weights bit for bit.

    python -m tools.field_scripts                  all scripts; a table, and exit status 1 if one differs
    python -m tools.field_scripts vae dcgan        some of them
    python -m tools.field_scripts --list           the scripts, without running them

The plain loops have the structure of the public scripts: networks and data are small and synthetic, with the shapes of
the originals. Both sides use the same order of samples. `loop` counts the lines that are only in the plain loop,
`port` those that are only in the port.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Script(NamedTuple):
    """A public script.

    Attributes:
        name: of the file in `scripts`.
        source: the project and the path of the script.
        note: the part of the port that is not obvious.
    """

    name: str
    source: str
    note: str


SCRIPTS = (
    Script("mnist", "pytorch/examples mnist", 'StepLR steps once an epoch: SchedulerConfig(..., interval="epoch")'),
    Script("vae", "pytorch/examples vae", 'the loss is a sum: loss_reduction = "sum"'),
    Script("dcgan", "pytorch/examples dcgan", "yield loss, optimizer: two updates in a step"),
    Script("siamese_network", "pytorch/examples siamese_network", "random pairs are drawn by (seed, epoch, index)"),
    Script("mnist_forward_forward", "pytorch/examples mnist_forward_forward", "yield; no layer may override train()"),
    Script("regression", "pytorch/examples regression", "max_steps for endless data; StopTraining at the goal"),
    Script("time_sequence_prediction", "pytorch/examples time_sequence_prediction", "L-BFGS needs no closure"),
    Script("reinforce", "pytorch/examples reinforcement_learning", "TensorDataset(torch.arange(EPISODES))"),
    Script("actor_critic", "pytorch/examples reinforcement_learning", "TensorDataset(torch.arange(EPISODES))"),
    Script(
        "word_language_model", "pytorch/examples word_language_model", "hidden state in get_state; a loader in order"
    ),
    Script("snli", "pytorch/examples snli", "validate_every=5 and keep_best=1"),
    Script("gcn", "pytorch/examples gcn", "sparse buffers need persistent=False"),
    Script("gat", "pytorch/examples gat", "splits_batches = False, because a node uses the whole graph"),
    Script("nanogpt", "karpathy/nanoGPT train.py", "schedulers.by_step; trainer.validate(log=True) before train()"),
    Script("glue", "huggingface/transformers run_glue_no_trainer", "self.plan.total_steps for the schedule"),
    Script("fsdp2", "pytorch/examples distributed/FSDP2", 'backend="fsdp" in two processes'),
)
WITHOUT_COUNTERPART = {"mnist_hogwild": "processes update shared weights without order, so two runs differ"}


def script(name: str) -> ModuleType:
    """The module with `plain` and `port` of a script."""
    return importlib.import_module(f"tools.field_scripts.scripts.{name}")


def largest_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors with equal shapes: 0 for equal bits, inf for nan."""
    assert [tensor.shape for tensor in one] == [tensor.shape for tensor in other]
    if all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
        return 0.0
    found = max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))
    return found if found == found and found > 0 else float("inf")  # not equal without a difference: nan


def changed_lines(module: ModuleType) -> tuple[int, int]:
    """The numbers of lines that only the plain loop has, and that only the port has."""

    def lines(of: Callable[..., Any] | type) -> list[str]:
        return [line.strip() for line in inspect.getsource(of).splitlines() if line.strip()]

    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    loop = [line for value in own if value.__name__.startswith("plain") for line in lines(value)]
    ported = [value for value in own if hasattr(value, "train_step") or value.__name__.startswith("port")]
    diff = list(difflib.ndiff(loop, [line for value in ported for line in lines(value)]))
    return sum(line.startswith("- ") for line in diff), sum(line.startswith("+ ") for line in diff)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the scripts; returns 1 if one differs."""
    parser = argparse.ArgumentParser(prog="tools.field_scripts", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="scripts (default: all)")
    parser.add_argument("--list", action="store_true", help="print the scripts without running them")
    given = parser.parse_args(argv)
    known = [one.name for one in SCRIPTS]
    if unknown := sorted(set(given.names) - set(known)):
        parser.error(f"no script {', '.join(unknown)}; there are {', '.join(known)}")
    torch.set_num_threads(1)  # so both sides add in the same order
    failed = False
    print(f"{'script':<26}{'loop':>5}{'port':>5}  {'difference':<12}{'seconds':>7}  note")
    for one in SCRIPTS:
        if given.names and one.name not in given.names:
            continue
        if given.list:
            print(f"{one.name:<26}{one.source:<46}{one.note}")
            continue
        began, module = time.perf_counter(), script(one.name)
        gone, added = changed_lines(module)
        difference = largest_difference(module.plain(), module.port())
        failed |= difference > 0
        shown = f"{difference:.1e}" if difference else "equal bits"
        seconds = time.perf_counter() - began
        print(f"{one.name:<26}{gone:>5}{added:>5}  {shown:<12}{seconds:>7.1f}  {one.note}", flush=True)
    for name, reason in WITHOUT_COUNTERPART.items():
        print(f"{name:<26}has no counterpart: {reason}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
