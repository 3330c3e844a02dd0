"""Searches the learning rate with Optuna, and prunes trials that are worse than the median.

Start it with `python examples/search.py`. It needs `pip install 'trainstack[optuna]'`.
"""

import tempfile

import optuna
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def make_data(seed: int, rows: int = 256) -> TensorDataset:
    """Inputs `(rows, 8)` and targets `(rows, 1)`, float32."""
    inputs = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def main() -> None:
    """Search, and print the best rate."""
    with tempfile.TemporaryDirectory() as folder:

        def objective(trial: optuna.Trial) -> float:
            ts.seed_everything(0)
            lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
            network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
            module = ts.SupervisedModule(
                network, nn.MSELoss(), "sgd", make_data(0), make_data(1), optimizer_kwargs={"lr": lr}
            )
            args = ts.TrainerArguments(
                epochs=6,
                train_batch_size=16,
                val_batch_size=64,
                output_dir=f"{folder}/{trial.number}",
                writers=[],
                progress="none",
            )
            trainer = ts.Trainer(module, args, callbacks=[ts.callbacks.OptunaPruning(trial)])
            trainer.train()
            return trainer.history.get_latest_metric("val/loss")

        sampler, pruner = optuna.samplers.RandomSampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
        study = optuna.create_study(direction="minimize", sampler=sampler, pruner=pruner)
        study.optimize(objective, n_trials=8)
    states = [trial.state.name for trial in study.trials]
    print(f"best lr {study.best_params['lr']:.4f}, {states.count('PRUNED')} of {len(states)} trials pruned")


if __name__ == "__main__":
    main()
