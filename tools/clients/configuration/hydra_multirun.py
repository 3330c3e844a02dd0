"""A Hydra application with `--multirun`; TrainerArguments are made from the DictConfig."""

import sys
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts

ConfigStore.instance().store(
    "config", {"lr": 0.1, "trainer": {"epochs": 2, "train_batch_size": 8, "output_dir": "run"}}
)


@hydra.main(version_base=None, config_name="config")
def main(config):
    inputs = torch.randn(16, 2)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = ts.SupervisedModule(nn.Linear(2, 1), nn.MSELoss(), "sgd", data, optimizer_kwargs={"lr": config.lr})
    trainer = ts.Trainer(module, ts.TrainerArguments.from_dict(config.trainer))
    trainer.train()
    Path(f"{config.lr}.steps").write_text(str(trainer.global_steps_finished))


if __name__ == "__main__":
    sys.argv[1:] = ["--multirun", "lr=0.1,0.2", "trainer.epochs=3", "trainer.output_dir=run-${lr}"]
    main()
    assert [Path(f"{lr}.steps").read_text() for lr in (0.1, 0.2)] == ["6", "6"]
    assert Path("run-0.2", "metrics.csv").exists()
