"""`explain`: what each layer does, and each verb's way through the stack, as the layers declare it."""

from __future__ import annotations

from trainstack.backends.base import VERBS, TrainerBackend
from trainstack.backends.build import build_trainer_backend


def explain(spec: str) -> str:
    """Describe the stack that `spec` builds, in plain text.

    Raises:
        BackendSpecError: `spec` is no legal stack.
    """
    return explain_stack(build_trainer_backend(spec))


def explain_stack(stack: TrainerBackend) -> str:
    """Describe a stack that was built already; see `explain`."""
    layers = list(stack.layers())
    lines = [f"{stack.spec}: {len(layers)} layer{'s' if len(layers) > 1 else ''}, outermost first", ""]
    width = max(len(layer.name) for layer in layers)
    lines += [f"  {layer.name:<{width}}   {layer.summary}" for layer in layers]
    lines += ["", "each verb's way:", ""]
    verb_width = max(map(len, VERBS))
    lines += [f"  {verb:<{verb_width}}   {way_of(stack, verb) or 'nothing to do'}" for verb in VERBS]
    together = [f"  {layer.name:<{width}}   {layer.collectives}" for layer in layers if layer.collectives]
    lines += ["", "what all processes do together:", "", *together] if together else []
    kept = sorted(stack.get_state())
    lines += ["", f"state in a checkpoint: {', '.join(kept) if kept else 'none'}"]
    return "\n".join(lines)


def way_of(stack: TrainerBackend, verb: str) -> str:
    """The layers in which `verb` does something, outermost first, e.g. `"amp > sp"` or `"amp (ends here)"`."""
    way = []
    for layer in stack.layers():
        if layer._acts_in(verb):
            way.append(layer.name)
        if verb in layer.ends:
            return " > ".join(way) + " (ends here)"
    return " > ".join(way)
