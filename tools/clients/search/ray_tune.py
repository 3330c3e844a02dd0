"""Ray Tune: each trial trains and reports each validation."""

import os
import sys

import torch
from ray import tune
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


class Report(ts.Callback):
    def on_validation_end(self, trainer, results):
        tune.report({"loss": results["val/loss"]})


def train(config):
    ts.seed_everything(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(
        nn.Linear(4, 1), nn.MSELoss(), "sgd", data, data, optimizer_kwargs={"lr": config["lr"]}
    )
    folder = os.path.join(tune.get_context().get_trial_dir(), "run")
    args = ts.TrainerArguments(epochs=2, train_batch_size=16, val_batch_size=16, output_dir=folder, progress="none")
    ts.Trainer(module, args, callbacks=[Report()]).train()


if __name__ == "__main__":
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"lr": tune.grid_search([0.1, 1e-5])},
        run_config=tune.RunConfig(storage_path=sys.argv[1], name="search"),
    )
    results = tuner.fit()
    assert not results.errors
    assert results.get_best_result("loss", "min").config["lr"] == 0.1
