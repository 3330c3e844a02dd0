"""mosaicml-streaming in two processes: it divides by rank, and each sample is used once."""

import os
import sys

import torch
from streaming import MDSWriter, StreamingDataset
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts


class Streamed(ts.ModuleInterface):
    def __init__(self, folder):
        super().__init__()
        self.model, self.seen = nn.Linear(1, 1), []
        self.stream = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=4)

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.stream, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def train_step(self, global_step, batch, device):
        self.seen.extend(batch["x"].tolist())
        return self.model(batch["x"][:, None].float()).square().mean()


def train(folder, sharding):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    module = Streamed(folder)
    args = ts.TrainerArguments(backend="ddp", train_batch_size=8, data_sharding=sharding)
    trainer = ts.Trainer(module, args)
    trainer.train()
    trainer.close()
    return module.seen


if __name__ == "__main__":
    folder = os.path.join(sys.argv[1], "mds")
    with MDSWriter(out=folder, columns={"x": "int"}) as out:
        for i in range(24):
            out.write({"x": i})
    parts = ts.launch(train, folder, "loader", nproc=2)
    assert sorted(parts[0] + parts[1]) == list(range(24)), parts
    try:
        ts.launch(train, folder, "auto", nproc=2)
    except Exception as error:
        assert "data_sharding" in str(error), error
    else:
        raise AssertionError("half of the data would be lost")
