"""A metric of `evaluate` over all outputs of a validation, like `compute_metrics` of transformers."""

import datasets
import evaluate
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


class Accuracy(evaluate.Metric):
    """A metric like those of the Hub, without a download."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="accuracy", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)}


class Classifier(ts.SupervisedModule):
    def on_end_val_epoch(self, global_step, outputs, key="default"):
        found = Accuracy().compute(predictions=outputs["outputs"].argmax(1), references=outputs["targets"])
        self.log("val/accuracy", found["accuracy"])


if __name__ == "__main__":
    ts.seed_everything(0)
    inputs = torch.randn(100, 2)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    module = Classifier(nn.Linear(2, 2), nn.CrossEntropyLoss(), "sgd", data, data, optimizer_kwargs={"lr": 0.5})
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=5, train_batch_size=10, val_batch_size=30))
    trainer.train()
    assert trainer.history.get_latest_metric("val/accuracy") > 0.9
