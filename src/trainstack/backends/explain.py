"""`explain`: what a backend string does, in plain text."""

from __future__ import annotations

from trainstack.backends.build import build_trainer_backend


def explain(spec: str) -> str:
    """Describe the stack that `spec` builds, in plain text.

    Raises:
        BackendSpecError: `spec` is no legal stack.
    """
    return build_trainer_backend(spec).explain()
