"""Training and eval modes of the parts of a module during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

Modes = Mapping[nn.Module, bool]
"""Submodules, with True for training mode and False for eval mode."""


class Decision(NamedTuple):
    """Result of `decide_modes`.

    Attributes:
        modes: modes of all submodules.
        kept: the largest parts that stay in eval mode.
        changed: names of the parts that were in eval mode and train in training mode; "" is the module itself.
    """

    modes: dict[nn.Module, bool]
    kept: tuple[nn.Module, ...]
    changed: tuple[str, ...]


def decide_modes(module: nn.Module, kept_before: tuple[nn.Module, ...] = ()) -> Decision:
    """Decide the modes in which `module` trains, from the modes that its parts have now.

    A part that is completely in eval mode keeps it in two cases: all its parameters are frozen, such as in a backbone
    or a reference model; or it is a single layer inside a part in training mode, such as a batch norm. All other parts
    train in training mode, with everything in them. The reason is `from_pretrained` of transformers: it returns models
    in eval mode, in which they would train without dropout.

    Args:
        module: the user's module.
        kept_before: parts that kept their eval mode in an earlier call of `train()`. They keep it also if the whole
            module has been put into eval mode since.
    """
    modes: dict[nn.Module, bool] = {}
    kept, changed = list[nn.Module](), list[str]()
    for part, name in _largest_parts(module):
        if part.training:  # a part of it is in eval mode
            modes[part] = True
            continue
        if any(inner.training for inner in part.modules()):
            changed.append(name)
            modes[part] = True
            continue
        inside = (
            [part] if name and _may_keep(part) else [p for p in part.modules() if p in kept_before and _may_keep(p)]
        )
        if inside != [part]:
            changed.append(name)
        modes.update((inner, True) for inner in part.modules())
        modes.update((inner, False) for keeps in inside for inner in keeps.modules())
        kept += inside
    return Decision(modes, tuple(kept), tuple(changed))


def _largest_parts(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parts that contain a part in training mode, and the largest parts that do not; each once, with name."""
    seen = set[nn.Module]()
    waiting = [(module, "")]
    while waiting:
        part, name = waiting.pop(0)
        if part in seen:
            continue
        seen.add(part)
        yield part, name
        if any(inner.training for inner in part.modules()):
            waiting += [(child, f"{name}.{key}" if name else key) for key, child in part.named_children()]


def _may_keep(part: nn.Module) -> bool:
    return not any(p.requires_grad for p in part.parameters()) or not any(True for _ in part.children())


def describe_modes(module: nn.Module, decision: Decision) -> str:
    """Describe which parts stay in eval mode and which do not, for the log."""
    said = []
    if decision.kept:
        count = len(decision.kept)
        said.append(f"{count} part{'s' * (count > 1)} of the module stay{'s' * (count == 1)} in eval mode")
    if decision.changed:
        names = ", ".join(name or type(module).__name__ for name in decision.changed)
        verb = "trains" if len(decision.changed) == 1 else "train"
        said.append(f"{names} had trainable parameters in eval mode and {verb} in training mode")
    return f"{'; '.join(said)}. keep_modes = True on the module keeps all modes."


def get_modes(module: nn.Module) -> dict[nn.Module, bool]:
    """Return the modes of all submodules."""
    return {part: part.training for part in module.modules()}


def begin_modes(module: nn.Module, modes: Modes) -> dict[nn.Module, bool]:
    """Put the submodules into `modes` at the start of training, and return the resulting modes.

    A part whose class overrides `train` decides the modes of the parts inside it. Such a method often keeps batch norms
    in eval mode.
    """
    wanted = dict(modes)
    for part in module.modules():  # outer parts first: `train` of an outer part sets the modes of its inner parts
        mode = wanted.get(part, part.training)
        if not _has_own_train(part):
            part.training = mode
        elif mode or part.training:
            part.train(mode)
            wanted |= {inner: False for inner in part.modules() if not inner.training}
    return get_modes(module)


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put the submodules into `modes`. A part that is not in `modes`, such as a new layer, keeps its mode.

    If the class of a part overrides `train`, this method is called: it may do more, such as merge weights.
    """
    for part in module.modules():
        mode = modes.get(part)
        if mode is None or part.training is mode:
            continue
        if _has_own_train(part):
            part.train(mode)  # also changes its inner parts, whose own modes follow in the next iterations
        else:
            part.training = mode


def _has_own_train(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train or "train" in vars(part)
