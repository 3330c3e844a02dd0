"""Which parts of a module train in training mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

Modes = Mapping[nn.Module, bool]
"""Submodules, and whether each is in training mode."""


class Decision(NamedTuple):
    """What `decide_modes` found.

    Attributes:
        modes: of all submodules.
        kept: the largest parts that stay in eval mode.
        changed: the names of the networks that were in eval mode and train in training mode; "" is the module itself.
    """

    modes: dict[nn.Module, bool]
    kept: tuple[nn.Module, ...]
    changed: tuple[str, ...]


def decide_modes(module: nn.Module, kept_before: tuple[nn.Module, ...] = ()) -> Decision:
    """The modes in which `module` trains, from the modes that the user gave its parts.

    A part that is wholly in eval mode keeps it if all its parameters are frozen, such as a backbone or a reference
    model, or if it is a single layer inside a part in training mode, such as a batch norm. Any other part trains in
    training mode, with all that it contains: `from_pretrained` of transformers returns whole models in eval mode, and
    to keep that would train them without dropout.

    Args:
        module: the user's module.
        kept_before: the parts that kept their eval mode when training began before. They keep it also where the whole
            module was put into eval mode since.
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
    """The parts that are not wholly in eval mode, and the largest ones that are, each once and with its name."""
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
    """A sentence about what stays in eval mode and what does not."""
    said = []
    if decision.kept:
        count = len(decision.kept)
        said.append(f"{count} part{'s' * (count > 1)} of the module stay{'s' * (count == 1)} in eval mode")
    if decision.changed:
        names = ", ".join(name or type(module).__name__ for name in decision.changed)
        said.append(f"{names} had trainable parameters in eval mode and trains in training mode")
    return f"{'; '.join(said)}. keep_modes = True on the module keeps all modes."


def get_modes(module: nn.Module) -> dict[nn.Module, bool]:
    """The modes of all submodules."""
    return {part: part.training for part in module.modules()}


def begin_modes(module: nn.Module, modes: Modes) -> dict[nn.Module, bool]:
    """Put the submodules into `modes` when training begins; returns those that result.

    A part with a `train` of its own decides for what is inside it: such a method often keeps batch norms in eval mode.
    """
    wanted = dict(modes)
    for part in module.modules():  # from the outside inwards
        mode = wanted.get(part, part.training)
        if not _has_own_train(part):
            part.training = mode
        elif mode or part.training:
            part.train(mode)
            wanted |= {inner: False for inner in part.modules() if not inner.training}
    return get_modes(module)


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put the submodules into `modes` again. One that `modes` does not know, such as a new layer, stays as it is.

    `train` of a part is called where its class defines it, for it may do more than set the flag, such as merge weights.
    """
    for part in module.modules():
        mode = modes.get(part)
        if mode is None or part.training is mode:
            continue
        if _has_own_train(part):
            part.train(mode)  # the parts inside it follow, and are put right after it
        else:
            part.training = mode


def _has_own_train(part: nn.Module) -> bool:
    return type(part).train is not nn.Module.train or "train" in vars(part)
