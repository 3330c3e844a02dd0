"""Show that the campaign finds each component of the state that is not restored.

    python -m tools.kills.breaks

Each row alters one value of one component in the checkpoint from which a killed training continues. The training
`steady` then has to end with other bits, or to refuse. The exit status is 1 if one component is not found.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tools.kills.campaign import Subject, attempt
from trainstack.checkpointing import Checkpoint
from trainstack.trainer.resume.saving import Saver

COMPONENTS: dict[str, tuple[str, str]] = {
    "weights": ("module_interface_state", "net.0.weight"),
    "buffers": ("module_interface_state", "running_mean"),
    "a counter of the module": ("module_interface_state", "seen"),
    "a generator of the module": ("module_interface_state", "noise"),
    "first moments": ("trainer_state", "exp_avg"),
    "second moments": ("trainer_state", "exp_avg_sq"),
    "momentum": ("trainer_state", "momentum_buffer"),
    "the step of the optimizer": ("trainer_state", "step"),
    "the plateau": ("trainer_state", "best"),
    "the cycle": ("trainer_state", "_step_count"),
    "user_state": ("trainer_state", "noted"),
    "the averages": ("callback_states", "net.0.weight"),
    "a counter of a callback": ("callback_states", "steps"),
    "random states": ("rng_state", "torch"),
    "the history": ("history_state", "values"),
}
"""For each component the field of the checkpoint, and a word in the path of one of its values."""


class Break:
    """Alters a value of each checkpoint that is loaded in this process; it can be pickled."""

    def __init__(self, field: str, word: str) -> None:
        self.field, self.word = field, word

    def __call__(self) -> None:
        """Break the library."""
        load = Saver.load

        def broken(saver: Saver) -> Checkpoint:
            checkpoint = load(saver)
            if checkpoint.global_step:
                for field in (self.field, "rank_states"):  # the last one has the state that differs between ranks
                    if alter(getattr(checkpoint, field), self.word):
                        break
                else:
                    raise LookupError(f"the checkpoint has no value with {self.word!r} in {self.field}")
            return checkpoint

        Saver.load = broken  # type: ignore[method-assign]


def alter(tree: Any, word: str) -> bool:
    """Alter the first value whose path has `word` as a key; returns whether there is one."""
    for path, holder, key in _leaves(tree, ()):
        if any(word == part or part.endswith(f".{word}") for part in map(str, path)):
            value = holder[key]
            if isinstance(value, torch.Tensor):
                flat = value.reshape(-1).clone()
                flat[-1] = flat[-1] + 1 if value.dtype is not torch.uint8 else flat[-1] ^ 1
                if word in ("torch", "noise"):
                    flat[8] = flat[8] ^ 1  # the first word of the state
                holder[key] = flat.reshape(value.shape)
            else:
                holder[key] = value + 1
            return True
    return False


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Path, container and key of each tensor and number below `tree`."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        inner = (*path, key)
        if isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool):
            if not isinstance(value, torch.Tensor) or value.numel():
                yield inner, tree, key
        else:
            yield from _leaves(value, inner)


def find(name: str, break_with: Callable[[], None] | None, folder: Path) -> bool:
    """Print a line, and return whether the campaign ends with other bits or a refusal."""
    outcome = attempt(Subject("steady", "sp", False), 1, random.Random(name), folder, break_with)
    print(f"{name:<28} {outcome.result:<10} {outcome.words[:150]}", flush=True)
    return outcome.result in ("different", "refused")


def main() -> int:
    """Run all rows; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="trainstack-breaks-") as root:
        unbroken = find("nothing is broken", None, Path(root, "0"))
        missed = [
            name
            for number, (name, where) in enumerate(COMPONENTS.items(), 1)
            if not find(name, Break(*where), Path(root, str(number)))
        ]
    print(
        f"{len(COMPONENTS) - len(missed)} of {len(COMPONENTS)} are found" + f"; NOT: {', '.join(missed)}" * bool(missed)
    )
    return 1 if missed or unbroken else 0


if __name__ == "__main__":
    sys.exit(main())
