"""webdataset in two processes, with shards divided among them."""

import os
import sys

import torch
import webdataset as wds
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts


def write_shards(folder):
    for shard in range(4):
        with wds.TarWriter(os.path.join(folder, f"part-{shard}.tar")) as sink:
            for i in range(6):
                sink.write({"__key__": f"{shard}-{i}", "x.cls": shard * 6 + i})


class Streamed(ts.ModuleInterface):
    def __init__(self, folder):
        super().__init__()
        self.model, self.seen = nn.Linear(1, 1), []
        self.urls = [os.path.join(folder, f"part-{shard}.tar") for shard in range(4)]

    def get_train_dataloader(self, sampler, batch_size):
        stream = wds.WebDataset(self.urls, nodesplitter=wds.split_by_node, shardshuffle=False)
        return DataLoader(stream.decode().to_tuple("x.cls"), batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def train_step(self, global_step, batch, device):
        self.seen.extend(batch[0].tolist())
        return self.model(batch[0][:, None].float()).square().mean()


def train(folder):
    module = Streamed(folder)
    trainer = ts.Trainer(
        module, ts.TrainerArguments(backend="ddp", train_batch_size=8, data_sharding={"train": "loader"})
    )
    trainer.train()
    trainer.close()
    return module.seen


if __name__ == "__main__":
    write_shards(sys.argv[1])
    parts = ts.launch(train, sys.argv[1], nproc=2)
    assert sorted(parts[0] + parts[1]) == list(range(24))
