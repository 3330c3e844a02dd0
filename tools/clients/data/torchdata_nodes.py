"""A pipeline of `torchdata.nodes` as the training loader."""

import torch
import torchdata.nodes as tn
from torch import nn
from torch.utils.data import RandomSampler, default_collate

import trainstack as ts

ROWS = [(torch.tensor([i / 10]), torch.tensor([i / 5])) for i in range(20)]


class Line(ts.SupervisedModule):
    def get_train_dataloader(self, sampler, batch_size):
        node = tn.MapStyleWrapper(map_dataset=ROWS, sampler=RandomSampler(ROWS))
        node = tn.Batcher(node, batch_size=batch_size, drop_last=False)
        return tn.Loader(tn.Mapper(node, lambda rows: tuple(default_collate(rows))))  # a list could be samples


if __name__ == "__main__":
    ts.seed_everything(0)
    module = Line(nn.Linear(1, 1), nn.MSELoss(), "sgd", ROWS, ROWS, optimizer_kwargs={"lr": 0.1})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=3, train_batch_size=8, val_batch_size=8))
    trainer.train()
    assert trainer.global_steps_finished == 9
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
