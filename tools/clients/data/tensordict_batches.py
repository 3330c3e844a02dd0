"""A TensorDict as dataset and as batch."""

import torch
from tensordict import TensorDict
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts


class Line(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(2, 1)
        x = torch.rand(32, 2)
        self.data = TensorDict({"x": x, "y": x.sum(1, keepdim=True)}, batch_size=32)

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.data, batch_size=batch_size, sampler=sampler(self.data), collate_fn=lambda batch: batch)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=0.1), None

    def train_step(self, global_step, batch, device):
        assert isinstance(batch, TensorDict)
        return nn.functional.mse_loss(self.model(batch["x"]), batch["y"])


if __name__ == "__main__":
    ts.seed_everything(0)
    trainer = ts.Trainer(Line(), ts.TrainerArguments(epochs=5, train_batch_size=8))
    trainer.train()
    losses = trainer.history.get_metric_values("train/loss_epoch")
    assert losses[-1] < losses[0]
