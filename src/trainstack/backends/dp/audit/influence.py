"""The neighbour probe on a module of the user's and the user's own data: can a record move more than it may?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainstack.backends.dp.audit.findings import Finding
from trainstack.backends.dp.audit.report import AuditReport
from trainstack.backends.dp.layer import DP
from trainstack.errors import ConfigurationError

if TYPE_CHECKING:
    from trainstack.trainer import ModuleInterface, TrainerArguments


def audit_module(module: ModuleInterface, args: TrainerArguments, *, rounds: int = 20) -> AuditReport:
    """Leave records out of small batches, and see whether the sum of clipped gradients changes by more than the norm.

    Every private run does this once before it trains; here it is done `rounds` times, with other records each time.
    The module is made ready for training, but not trained.

    Args:
        module: as for a `Trainer`.
        args: with a private backend and `differential_privacy_args`.
        rounds: how often; in each, four records are left out.

    Raises:
        PrivacyError: a private run with this module would be refused.
        ConfigurationError: the backend is not private.
    """
    from trainstack.trainer import Trainer

    trainer = Trainer(module, args)
    layer = next((layer for layer in trainer.trainer_backend.layers() if isinstance(layer, DP)), None)
    if layer is None:
        raise ConfigurationError(f"backend {args.backend!r} is not private, so there is nothing to audit. Write 'sp-dp'.")
    try:
        steps = trainer.plan.total_steps
        problems = [problem for _ in range(rounds) for problem in layer.probe_neighbours()]
    finally:
        trainer.close()
    seen = f"{rounds} batches, {len(problems)} with too much influence" + (f": {problems[0]}" if problems else "")
    claim = "a record moves the clipped sum by the clipping norm at most"
    finding = Finding(probe="neighbours", claim=claim, seen=seen, p_value=float(not problems))
    return AuditReport(subject=f"{type(module).__name__} on {args.backend}, {steps} steps", findings=(finding,))
