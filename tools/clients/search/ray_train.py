"""Ray Train with two workers: an ordinary training in the function of TorchTrainer."""

import os
import sys

import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


def train(config):
    ts.seed_everything(0)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(nn.Linear(4, 1), nn.MSELoss(), "sgd", data, data, optimizer_kwargs={"lr": 0.1})
    args = ts.TrainerArguments(
        backend="ddp",
        train_batch_size=16,
        val_batch_size=16,
        epochs=3,
        output_dir=config["output_dir"],
        progress="none",
    )
    trainer = ts.Trainer(module, args)
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    folder = os.path.join(sys.argv[1], "run")
    TorchTrainer(
        train,
        train_loop_config={"output_dir": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=os.path.join(sys.argv[1], "ray")),
    ).fit()
    losses = ts.read_history(folder).get_metric_values("val/loss")
    assert len(losses) == 3
    assert losses[-1] < losses[0]
