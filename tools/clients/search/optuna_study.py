"""An Optuna study with a simple objective that trains."""

import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def objective(trial):
    ts.seed_everything(0)
    inputs = torch.randn(64, 2)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    rate = trial.suggest_float("lr", 1e-4, 0.5, log=True)
    module = ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", data, data, optimizer_kwargs={"lr": rate})
    args = ts.TrainerArguments(
        epochs=3,
        train_batch_size=8,
        val_batch_size=32,
        output_dir=f"trials/{trial.number}",
        writers=[],
        log_level="ERROR",
    )
    trainer = ts.Trainer(module, args)
    trainer.train()
    return trainer.history.get_latest_metric("val/loss")


if __name__ == "__main__":
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=6)
    assert study.best_value < max(trial.value for trial in study.trials)
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)
