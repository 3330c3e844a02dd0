"""Muon for the matrices and AdamW for the rest, with transformers' schedules on both."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import get_linear_schedule_with_warmup

import trainstack as ts


class Two(ts.SupervisedModule):
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim != 2]
        made = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]
        return made, [get_linear_schedule_with_warmup(each, 2, self.plan.total_steps) for each in made]


def train(epochs, folder):
    ts.seed_everything(0)
    inputs = torch.randn(64, 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    args = ts.TrainerArguments(epochs=4, max_steps=epochs * 8, train_batch_size=8, output_dir=folder, resume="auto")
    trainer = ts.Trainer(Two(net, nn.MSELoss(), "sgd", data), args)
    trainer.train()
    return trainer


if __name__ == "__main__":
    losses = train(4, "whole").history.get_metric_values("train/loss_epoch")
    assert losses[-1] < losses[0]
