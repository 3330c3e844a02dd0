"""`split_dataset_by_node` in two processes: an error without `data_sharding`, all samples with it."""

import os

import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts


class Streamed(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.seen = nn.Linear(1, 1), []
        rows = Dataset.from_dict({"x": [float(i) for i in range(24)]}).to_iterable_dataset(num_shards=4)
        self.stream = split_dataset_by_node(rows, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.stream.with_format("torch"), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def train_step(self, global_step, batch, device):
        self.seen.extend(batch["x"].int().tolist())
        return self.model(batch["x"][:, None]).square().mean()


def train(sharding):
    module = Streamed()
    args = ts.TrainerArguments(backend="ddp", train_batch_size=8, data_sharding=sharding)
    trainer = ts.Trainer(module, args)
    trainer.train()
    trainer.close()
    return module.seen


if __name__ == "__main__":
    parts = ts.launch(train, "loader", nproc=2)
    assert sorted(parts[0] + parts[1]) == list(range(24))
    try:
        ts.launch(train, "auto", nproc=2)
    except Exception as error:
        assert "data_sharding" in str(error), error
    else:
        raise AssertionError("half of the data would be lost")
