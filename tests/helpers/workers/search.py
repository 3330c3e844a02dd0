"""A search with Optuna over several processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

import trainstack as ts
from tests.helpers.modules import Classifier, arguments, numbers
from tests.helpers.workers import RANK

RATES = [0.3, 1e-5]


class Broken:
    """A trial whose storage is out of reach."""

    study = None

    def report(self, value: float, step: int) -> None:
        raise ConnectionError("no storage")


def pruned(directory: str) -> dict[str, Any]:
    """The result of each trial of a study on this process; the second is worse than the median before it."""
    import optuna

    results = list[list[Any]]()

    def train(trial: Any) -> float:
        given = [trial and (trial.suggest_categorical("lr", RATES), trial.number)]
        dist.broadcast_object_list(given)
        rate, number = given[0]
        callback = ts.callbacks.OptunaPruning(trial)
        args = arguments(
            f"{directory}/{number}",
            backend="ddp",
            epochs=3,
            val_batch_size=4,
            checkpointer_args=ts.DefaultCheckpointerArguments(),
        )
        trainer = ts.Trainer(Classifier(numbers(17), validate=True, lr=rate), args, callbacks=[callback])
        ended = "completed"
        try:
            trainer.train()
        except optuna.TrialPruned as error:
            ended = str(error)
            raise
        finally:
            results.append([ended, trainer.global_steps_finished, trainer.stop_reason])
        return trainer.history.get_latest_metric("val/loss")

    dist.init_process_group("gloo")
    try:
        if RANK == 0:
            pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)
            for rate in RATES:
                study.enqueue_trial({"lr": rate})
            study.optimize(train, n_trials=len(RATES))
            states = [(trial.state.name, sorted(trial.intermediate_values)) for trial in study.trials]
        else:
            states = []
            for _ in RATES:
                try:
                    train(None)
                except optuna.TrialPruned:
                    states.append("TrialPruned")
        failure = ""
        module = ts.SupervisedModule(nn.Linear(6, 3), nn.CrossEntropyLoss(), "sgd", numbers(8), numbers(8))
        callback = ts.callbacks.OptunaPruning(Broken() if RANK == 0 else None)
        try:
            ts.Trainer(module, arguments(f"{directory}/broken", backend="ddp"), callbacks=[callback]).train()
        except (ConnectionError, ts.PeerError) as error:
            failure = f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return {"results": results, "states": states, "failure": failure}
