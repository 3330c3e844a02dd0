"""torch.optim.LBFGS with a closure: `train_step` yields a function that computes the loss."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.functional import r2_score

import trainstack as ts


class Fit(ts.SupervisedModule):
    def train_step(self, global_step, batch, device):
        inputs, targets = batch

        def closure():
            return nn.functional.mse_loss(self.model(inputs), targets)

        yield closure, 0
        return closure()


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(64, 3)
    targets = inputs @ torch.tensor([[1.0], [2.0], [-1.0]])
    module = Fit(nn.Linear(3, 1), nn.MSELoss(), torch.optim.LBFGS, TensorDataset(inputs, targets))
    ts.Trainer(module, ts.TrainerArguments(epochs=3, train_batch_size=64, clip_grads=False)).train()
    assert r2_score(module.model(inputs).squeeze(1), targets.squeeze(1)) > 0.999
