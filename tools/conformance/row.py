"""Run all cases of one trainer in its environment: `python -m tools.conformance.row TRAINER ANSWER [CASE ...]`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when torch is imported

import json
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from tools.conformance.adapter import NotOfferedError, Verdict, load
from tools.conformance.case import Case, all_cases, describe


def verdicts(trainer: str, ids: Iterable[str] = ()) -> Iterator[tuple[Case, Verdict]]:
    """Yield the cells of a trainer. An error is a result."""
    chosen, adapter = set(ids), load(trainer)
    unknown = {*adapter.notes, *adapter.not_offered} - {case.id for case in all_cases()}
    if unknown:
        raise ValueError(f"the adapter {trainer!r} names {sorted(unknown)}, which are not cases.")
    for case in all_cases():
        if chosen and case.id not in chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            yield case, verdict(case, trainer, Path(folder))


def verdict(case: Case, trainer: str, folder: Path) -> Verdict:
    """One cell."""
    adapter = load(trainer)
    if case.id in adapter.not_offered:
        return Verdict("n.a.", adapter.not_offered[case.id])
    try:
        found = case.run(adapter, trainer, folder)
    except NotOfferedError as error:
        return Verdict("n.a.", str(error))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = Verdict("wrong", f"raises {describe(error)}")
    if found.status == "wrong" and case.id in adapter.notes:
        return Verdict("wrong", f"{found.seen} ({adapter.notes[case.id]})")
    return found


def main(trainer: str, answer: str, *ids: str) -> None:
    """Write the cells and the versions as JSON."""
    torch.set_num_threads(1)
    cells = {}
    for case, verdict in verdicts(trainer, ids):
        cells[case.id] = asdict(verdict)
        print(f"{trainer}: {case.title}: {verdict.status} {verdict.seen}", flush=True)
    versions = {"trainer": load(trainer).version(), "torch": torch.__version__}
    Path(answer).write_text(json.dumps({"versions": versions, "cells": cells}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
