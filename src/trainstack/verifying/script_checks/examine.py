"""`examine` makes the dry run of a module and applies all checks to it."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator
from typing import Any

from trainstack.trainer import ModuleInterface, TrainerArguments
from trainstack.verifying.determinism.user_sources import SourceWatch
from trainstack.verifying.script_checks import (  # noqa: F401 - each file registers its checks
    data_checks,
    evaluation_checks,
    loss_checks,
    model_checks,
    optimizer_checks,
    source_checks,
)
from trainstack.verifying.script_checks.dry_run import collect
from trainstack.verifying.script_checks.evidence import Evidence
from trainstack.verifying.script_checks.findings import CHECKS, LEVELS, Finding, ScriptReport
from trainstack.verifying.script_checks.sources import Source
from trainstack.verifying.script_checks.trainer_messages import findings_of_error, findings_of_messages


def examine(
    target: str,
    module: ModuleInterface,
    args: TrainerArguments,
    source: Source | None = None,
    *,
    steps: int = 3,
    ignore: Collection[str] = (),
    **given: Any,
) -> ScriptReport:
    """Train a few steps of `module`, and look for mistakes.

    Args:
        target: the script, for the report.
        module: is trained, and not used otherwise afterwards.
        args: of the run that the script would make.
        source: the file of the user.
        steps: the number of global steps.
        ignore: ids of the checks to omit.
        **given: further arguments of the trainer.
    """
    evidence = collect(module, args, source, steps, **given)
    error = evidence.error
    found = {finding: None for finding in _findings(evidence) if finding.id not in ignore}
    return ScriptReport(
        target=target,
        findings=sorted(found, key=lambda one: (LEVELS.index(one.level), one.id, one.place)),
        steps=len(evidence.gradients),
        validated=bool(evidence.metrics),
        ended="" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}",
    )


def _findings(evidence: Evidence) -> Iterator[Finding]:
    yield from findings_of_messages(evidence)
    if evidence.error is not None:
        yield from findings_of_error(evidence, error_place(evidence.error))
    for one in CHECKS.values():
        for found in one.run(evidence) if one.run is not None else ():
            yield Finding(one.id, one.level, *found)


def error_place(error: BaseException) -> str:
    """`file:line` of the last frame of the user's code in a traceback."""
    frames, place = SourceWatch(), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frames.is_of_user(frame.f_code):
            place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
    return place
