"""A stream of `datasets`: `shuffle` gives another order in each epoch, because the trainer calls `set_epoch`."""

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts

seen = []


class Streamed(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)
        rows = Dataset.from_dict({"x": [float(i) for i in range(24)]})
        self.stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=0, buffer_size=8).with_format("torch")

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.stream, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def train_step(self, global_step, batch, device):
        seen.extend(batch["x"].int().tolist())
        return self.model(batch["x"][:, None]).square().mean()


if __name__ == "__main__":
    ts.Trainer(Streamed(), ts.TrainerArguments(epochs=3, train_batch_size=8)).train()
    epochs = [seen[i * 24 : (i + 1) * 24] for i in range(3)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
