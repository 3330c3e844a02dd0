"""Private runs and audits over several processes."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from unittest import mock

import torch.distributed as dist

import trainstack as ts
from tests.helpers.modules import Classifier, weights
from tests.helpers.private_runs import BreaksOff, TwoOptimizers, private, promise
from trainstack.backends.dp import SpendLedger
from trainstack.backends.dp import ledger_store as ledger_file


def private_ranks(directory: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result of each of some runs over processes; an error's text for one that is refused."""
    found: dict[str, Any] = {}
    for name, options in runs.items():
        options = dict(options)
        args = promise(**options.pop("promise", {}))
        if options.pop("saves", False):
            options["checkpointer_args"] = ts.DefaultCheckpointerArguments()
        module = TwoOptimizers(seed=int(os.environ["RANK"]))  # of which only the main process's weights count
        trainer = ts.Trainer(module, private(f"{directory}/{name}", args, backend="ddp-dp", **options))
        try:
            trainer.train()
        except ts.TrainstackError as error:
            found[name] = {"error": str(error)}
            continue
        statement = trainer.privacy_statement()
        found[name] = {
            "weights": weights(module).tolist(),
            "steps": statement.steps,
            "epsilon": statement.epsilon,
            "planned": trainer.plan.total_steps,
        }
    return found


class CarriesOnOne(Classifier):
    """The second process scales its loss by a value that it keeps of earlier records."""

    kept = 1.0

    def train_step(self, global_step: int, batch: Any, device: Any) -> Any:
        loss = self.kept * super().train_step(global_step, batch, device)
        if global_step >= 3 and os.environ["RANK"] == "1":
            self.kept += float(batch[0].detach().abs().mean())
        return loss


def carries_records(directory: str) -> dict[str, Any]:
    """The refusal on each process, and the entry of the run in the ledger."""
    args = private(directory, promise(noise_multiplier=1.0, grad_mode="loop"), backend="ddp-dp")
    try:
        ts.Trainer(CarriesOnOne(), args).train()
    except ts.TrainstackError as error:
        ledger = SpendLedger(f"{directory}/privacy-ledger.jsonl")
        ledger.runs()
        return {"error": str(error), "void": [*ledger.voided.values()]}
    return {"error": None}


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def closed_on_a_full_disk(directory: str) -> dict[str, Any]:
    """Stop within a block of the ledger, close where the rest cannot be refunded, start again."""
    args = private(directory, promise(noise_multiplier=1.0), backend="ddp-dp", resume="auto")
    trainer = ts.Trainer(BreaksOff(2), args)
    with suppress(ArithmeticError):
        trainer.train()
    found: dict[str, Any] = {"error": None}
    with mock.patch.object(ledger_file, "write", full_disk):
        try:
            trainer.close()
        except ts.TrainstackError as error:
            found["error"] = str(error)
    found["open"] = dist.is_initialized()
    again = ts.Trainer(BreaksOff(10**9), args)
    again.train()
    return {**found, "steps": again.privacy_statement().steps}


def audited(**changes: Any) -> dict[str, Any]:
    """A privacy audit by all processes, of two small runs of each probe."""
    from tools.attacks.runs import unprobed
    from trainstack.auditing import audit

    private = ts.DifferentialPrivacyArguments(delta=1e-6, noise_multiplier=2.0, **changes)
    with unprobed():
        report = audit(private, "ddp-dp", train_batch_size=50, dataset_size=200, epochs=1)
    return {"report": report.to_dict(), "text": report.text}
