"""A metric over the training epoch, computed and logged in a hook."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import trainstack as ts


class Classifier(ts.SupervisedModule):
    accuracy = MulticlassAccuracy(2, average="micro")

    def on_begin_train_epoch(self, global_step, epoch):
        self.accuracy.reset()

    def on_end_train_step(self, global_step, outputs):
        self.accuracy.update(outputs["outputs"], outputs["targets"])

    def on_end_train_epoch(self, global_step):
        self.log("train/accuracy", self.accuracy.compute())


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(100, 2)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    module = Classifier(nn.Linear(2, 2), nn.CrossEntropyLoss(), "sgd", data, optimizer_kwargs={"lr": 0.5})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=4, train_batch_size=10))
    trainer.train()
    assert len(trainer.history.get_metric_values("train/accuracy")) == 4
    assert trainer.history.get_latest_metric("train/accuracy") > 0.9
