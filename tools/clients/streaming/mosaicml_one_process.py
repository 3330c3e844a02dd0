"""mosaicml-streaming in one process, with validation on a second stream."""

import os
import sys

import torch
from streaming import MDSWriter, StreamingDataset
from torch import nn
from torch.utils.data import DataLoader

import trainstack as ts


class Line(ts.SupervisedModule):
    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_dataset, batch_size=batch_size)

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(self.val_dataset, batch_size=batch_size)


if __name__ == "__main__":
    folder = os.path.join(sys.argv[1], "mds")
    with MDSWriter(out=folder, columns={"x": "ndarray:float32:1", "y": "ndarray:float32:1"}) as out:
        for i in range(20):
            x = torch.tensor([i / 10]).numpy()
            out.write({"x": x, "y": 2 * x})
    stream = StreamingDataset(local=folder, shuffle=True, shuffle_seed=0, batch_size=5)
    module = Line(
        nn.Linear(1, 1),
        nn.functional.mse_loss,
        "sgd",
        stream,
        stream,
        input_mapping={"x": "input", "y": "target"},
        optimizer_kwargs={"lr": 0.05},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=3, train_batch_size=5, val_batch_size=5))
    trainer.train()
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
