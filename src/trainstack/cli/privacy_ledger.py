"""`trainstack privacy statement | ledger | best-of` prints the account of runs on disk."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from trainstack._files import read_small
from trainstack.backends.dp import PrivacyStatement, SpendLedger, best_of_epsilon, epsilon_of
from trainstack.backends.dp.accounting import ACCOUNTANTS
from trainstack.backends.dp.statement import joined, ledger_words, restated
from trainstack.backends.privacy_statement import round_up
from trainstack.checkpointing import manifest
from trainstack.checkpointing.directory import read_manifest, scan
from trainstack.cli.printing import print_json, print_line, print_lines, print_table
from trainstack.errors import CheckpointNotFoundError, ConfigurationError, PrivacyLedgerError

OWN_LEDGER = "privacy-ledger.jsonl"


def add(questions: Any) -> None:
    """Add the three questions to those of `trainstack privacy`."""
    statement = questions.add_parser("statement", help="the statement of a run on disk, also while it runs")
    statement.add_argument("run_dir", metavar="RUN", help="the output_dir of the run, a checkpoint, or an export")
    statement.set_defaults(run=_run_statement)
    ledger = questions.add_parser("ledger", help="the account of all runs that charge a ledger")
    ledger.add_argument("ledger", metavar="FILE", help="the ledger of a dataset or of a run")
    ledger.add_argument("--delta", type=float, help="smaller than 1 / N; by default that of the ledger's budget")
    ledger.add_argument("--accountant", choices=ACCOUNTANTS, default="prv", help="prv is tighter, rdp quicker")
    ledger.add_argument("--budget", type=float, metavar="EPSILON", help="from now on, let all runs spend this together")
    ledger.set_defaults(run=_run_ledger)
    best = questions.add_parser("best-of", help="epsilon of releasing only the best of K runs, K drawn from Poisson")
    best.add_argument("--mean-runs", type=float, required=True, metavar="MU", help="the mean of K")
    best.add_argument("--noise-multiplier", type=float, required=True, metavar="SIGMA", help="of each step")
    best.add_argument("--sample-rate", type=float, required=True, metavar="Q", help="batch size / N")
    best.add_argument("--steps", type=int, required=True, help="of each run")
    best.add_argument(
        "--score-noise", type=float, metavar="SIGMA", help="of the released score; not needed for a public score"
    )
    best.add_argument("--delta", type=float, required=True, help="smaller than 1 / N")
    best.set_defaults(run=_run_best)
    for question in (statement, ledger, best):
        question.add_argument("--json", action="store_true", help="print one JSON object")


def _run_statement(args: argparse.Namespace) -> int:
    statement = current_statement(Path(args.run_dir))
    if args.json:
        print_json(json.loads(statement.to_json()))
    else:
        print_lines(statement.text)
    return 0


def current_statement(folder: Path) -> PrivacyStatement:
    """The statement of the run in `folder`, by its ledger; that of a checkpoint or an export is the stored one.

    Raises:
        CheckpointNotFoundError: there is no statement of a private run.
        PrivacyLedgerError: the ledger is damaged, or lacks steps of the run.
    """
    if (folder / manifest.FILE_NAME).is_file():
        told = (read_manifest(folder).metadata or {}).get("privacy")
        if not told:
            raise CheckpointNotFoundError(f"{folder} is of a training that was not private: it has no statement.")
        return PrivacyStatement.from_json(json.dumps(told))
    found = _stored_statements(folder)
    if not found:
        raise CheckpointNotFoundError(
            f"{folder} has neither privacy_statement.json nor a checkpoint of a private run. Give the output_dir of "
            "one, a checkpoint or an export; for the account of a ledger run: trainstack privacy ledger "
            f"{folder / OWN_LEDGER} --delta DELTA"
        )
    if found[0].run is None:
        return found[0]
    found = [one for one in found if one.run == found[0].run]
    ledger = _ledger_of(found, folder / OWN_LEDGER)
    if ledger is not None:
        return restated(found, ledger)
    statement = joined(found)
    if statement.status == "running" or statement.ledger is None or statement.overrides:
        return statement  # figures of all planned steps
    raise PrivacyLedgerError(
        f"The privacy ledger {statement.ledger} does not know the run of {folder}, which may have made further steps. "
        "Put the newest copy of the ledger there."
    )


def _ledger_of(found: list[PrivacyStatement], own: Path) -> SpendLedger | None:
    """The ledger that knows most steps of a run; None if the one that it charged last does not know the run."""
    run, book, named = str(found[0].run), SpendLedger(own), found[0].ledger
    last = book.moved.get(run) if run in book.runs() else named
    last = named if last is None and named is not None and Path(named).name != OWN_LEDGER else last
    books = [book, *([] if last is None else [SpendLedger(last)])]
    if run not in books[-1].runs():
        return None
    return max(books, key=lambda one: one.runs().get(run, -1))


def _stored_statements(folder: Path) -> list[PrivacyStatement]:
    """The statement in the file, which a run writes before its first step, then that of the newest checkpoint."""
    found, file = [], folder / "privacy_statement.json"
    if file.is_file():
        found.append(PrivacyStatement.from_json(read_small(file).decode()))
    for place in (folder, folder / "checkpoints"):
        checkpoints = scan(place).intact if place.is_dir() else []
        told = [(read_manifest(info.path).metadata or {}).get("privacy") for info in checkpoints[:1]]
        found += [PrivacyStatement.from_json(json.dumps(one)) for one in told if one]
    return found


def _run_ledger(args: argparse.Namespace) -> int:
    path = Path(args.ledger)
    if not path.exists() and "://" not in args.ledger and args.budget is None:
        raise CheckpointNotFoundError(f"{path} does not exist. Give the file that runs charge, such as {OWN_LEDGER}.")
    ledger = SpendLedger(args.ledger)
    ledger.runs()
    delta = args.delta if args.delta is not None or ledger.budget is None else ledger.budget[1]
    if delta is None:
        raise ConfigurationError("At which delta? Write --delta, smaller than 1 / (number of records).")
    if not 0 < delta < 1:
        raise ConfigurationError(f"--delta {delta}: write a number between 0 and 1, smaller than 1 / N.")
    if args.budget is not None:
        if not (args.budget > 0 and math.isfinite(args.budget)):
            raise ConfigurationError(f"--budget {args.budget}: write a number above 0.")
        ledger.set_budget(args.budget, delta)
    runs: list[dict[str, Any]] = [
        {"run": run, "steps": steps, "epsilon": _epsilon(ledger, run, delta, args), "folder": ledger.folder_of(run)}
        for run, steps in ledger.runs().items()
    ]
    together = _epsilon(ledger, None, delta, args)
    if args.json:
        facts = {"dataset": ledger.dataset, "budget": ledger.budget, "copies": ledger.copies(), "void": ledger.voided}
        print_json({"ledger": ledger.path, "delta": delta, "epsilon": together, "runs": runs, **facts})
        return 0
    rows = [[r["run"][:12], str(r["steps"]), _shown(r["epsilon"]), r["folder"] or ""] for r in runs]
    print_table(("run", "steps", "epsilon", "folder"), rows, spare=("folder",))
    print_line(ledger_words(ledger, delta, args.accountant) + ".")
    for words in ledger.copies():
        print_line(f"{words}.")
    return 0


def _epsilon(ledger: SpendLedger, run: str | None, delta: float, args: argparse.Namespace) -> float | None:
    """The epsilon of a run or of all; None where they guarantee nothing."""
    void = bool(ledger.voided) if run is None else run in ledger.voided
    return None if void else epsilon_of([*ledger.spent(run), *ledger.unused(run)], delta, args.accountant)


def _run_best(args: argparse.Namespace) -> int:
    history = [(args.noise_multiplier, args.sample_rate, args.steps)]
    if args.score_noise is not None:
        history.append((args.score_noise, 1.0, 1))
    found = {
        "epsilon": best_of_epsilon(history, args.delta, args.mean_runs),
        "one_run": epsilon_of(history, args.delta, "rdp"),
        "all_released": epsilon_of([(s, q, n * math.ceil(args.mean_runs)) for s, q, n in history], args.delta, "rdp"),
    }
    if args.json:
        print_json({**found, "mean_runs": args.mean_runs, "delta": args.delta, "assumes": ASSUMES})
        return 0
    shown = {name: _shown(value) for name, value in found.items()}
    print_line(f"epsilon {shown['epsilon']} at delta {args.delta:g} where only the best of K runs is released")
    print_line(
        f"one run: {shown['one_run']}; all runs released, if they are {math.ceil(args.mean_runs)}: "
        f"{shown['all_released']} (K can be larger)"
    )
    print_line(f"assumes: {ASSUMES}")
    return 0


ASSUMES = (
    "K is drawn from Poisson(MU) before the first run and stays secret, as the other runs do; each run has the same "
    "noise, rate and steps; the score is public, or released with --score-noise"
)


def _shown(epsilon: float | None) -> str:
    if epsilon is None:
        return "NOT PRIVATE"
    return "infinite" if math.isinf(epsilon) else round_up(epsilon)
