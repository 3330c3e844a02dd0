"""Pruning with a ready callback: bad trials end early, as pruned."""

import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def objective(trial):
    ts.seed_everything(0)
    inputs = torch.randn(64, 2)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    rate = trial.suggest_categorical("lr", [0.1, 1e-6])
    module = ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", data, data, optimizer_kwargs={"lr": rate})
    args = ts.TrainerArguments(
        epochs=4,
        train_batch_size=8,
        val_batch_size=32,
        output_dir=f"trials/{trial.number}",
        writers=[],
        log_level="ERROR",
    )
    trainer = ts.Trainer(module, args, callbacks=[ts.callbacks.OptunaPruning(trial)])
    trainer.train()
    return trainer.history.get_latest_metric("val/loss")


if __name__ == "__main__":
    sampler = optuna.samplers.GridSampler({"lr": [0.1, 1e-6]}, seed=1)
    study = optuna.create_study(
        sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    )
    study.enqueue_trial({"lr": 0.1})
    study.optimize(objective, n_trials=3)
    states = {trial.params["lr"]: trial.state.name for trial in study.trials}
    assert states == {0.1: "COMPLETE", 1e-6: "PRUNED"}, states
