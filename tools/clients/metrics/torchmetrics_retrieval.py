"""A retrieval metric fed by a `val_step` of a class derived from SupervisedModule."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.retrieval import RetrievalMRR

import trainstack as ts


class Ranking(ts.SupervisedModule):
    def val_step(self, global_step, batch, device):
        inputs, relevant, query = batch
        return {"preds": self.model(inputs).squeeze(1), "target": relevant.squeeze(1) > 0, "indexes": query}

    def train_step(self, global_step, batch, device):
        inputs, relevant, _ = batch
        return nn.functional.mse_loss(self.model(inputs), relevant)


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(60, 2)
    relevant = (inputs[:, :1] == inputs[:, :1].reshape(12, 5).amax(1).repeat_interleave(5)[:, None]).float()
    data = TensorDataset(inputs, relevant, torch.arange(12).repeat_interleave(5))
    module = Ranking(
        nn.Linear(2, 1), nn.MSELoss(), "adam", data, data, optimizer_kwargs={"lr": 0.1}, metrics={"mrr": RetrievalMRR()}
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=5, train_batch_size=20, val_batch_size=17))
    trainer.train()
    assert trainer.history.get_latest_metric("val/mrr") == 1.0
