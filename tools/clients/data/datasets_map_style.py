"""A dataset of `datasets` with columns as tensors, without conversion."""

from datasets import Dataset
from torch import nn

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    data = Dataset.from_dict({"x": [[i / 20, 1.0] for i in range(20)], "y": [[i / 10] for i in range(20)]})
    data = data.train_test_split(0.2, seed=0).with_format("torch")
    module = ts.SupervisedModule(
        nn.Linear(2, 1),
        nn.functional.mse_loss,
        "sgd",
        data["train"],
        data["test"],
        input_mapping={"x": "input", "y": "target"},
        optimizer_kwargs={"lr": 0.1},
    )
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=4, train_batch_size=4, val_batch_size=4))
    trainer.train()
    losses = trainer.history.get_metric_values("val/loss")
    assert losses[-1] < losses[0]
