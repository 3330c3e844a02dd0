"""Functions of sklearn.metrics over all outputs of a validation."""

import torch
from sklearn.metrics import average_precision_score, f1_score
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


class Classifier(ts.SupervisedModule):
    def on_end_val_epoch(self, global_step, outputs, key="default"):
        scores, target = outputs["outputs"].softmax(1)[:, 1], outputs["targets"]
        self.log("val/f1", f1_score(target, scores > 0.5))
        self.log("val/average_precision", average_precision_score(target, scores))


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(100, 2)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    module = Classifier(nn.Linear(2, 2), nn.CrossEntropyLoss(), "sgd", data, data, optimizer_kwargs={"lr": 0.5})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=5, train_batch_size=10, val_batch_size=30))
    trainer.train()
    assert trainer.history.get_latest_metric("val/f1") > 0.9
