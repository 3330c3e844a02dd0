"""BLEU over strings that `val_step` returns."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.text import BLEUScore

import trainstack as ts


class Copier(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)
        self.metrics = {"bleu": BLEUScore(n_gram=2)}
        self.data = TensorDataset(torch.arange(10.0)[:, None])

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader(self.data, sampler, batch_size)

    get_val_dataloaders = get_train_dataloader

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.SGD(self.parameters(), lr=1e-4), None

    def train_step(self, global_step, batch, device):
        return self.model(batch[0]).square().mean()

    def val_step(self, global_step, batch, device):
        texts = [f"row number {int(x)} it is" for x in batch[0]]
        return {"preds": texts, "target": [[text] for text in texts]}


if __name__ == "__main__":
    trainer = ts.Trainer(Copier(), ts.TrainerArguments(train_batch_size=5, val_batch_size=4))
    trainer.train()
    assert trainer.history.get_latest_metric("val/bleu") == 1.0
