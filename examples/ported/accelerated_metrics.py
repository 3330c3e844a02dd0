"""A pytorch-accelerated script, in the shape of its example of metrics in a callback, on digits.

    python examples/ported/accelerated_metrics.py

Comments show the original lines. docs/coming-from/pytorch-accelerated.md explains the differences. The data is
scikit-learn's 1797 images of 8 x 8. Needs torchmetrics.
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from trainstack import Callback, SupervisedModule, Trainer, TrainerArguments, callbacks, placeholders, seed_everything


class DigitsModel(nn.Module):
    """Three linear layers."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            *(nn.Linear(in_features=64, out_features=128), nn.ReLU()),
            *(nn.Linear(in_features=128, out_features=64), nn.ReLU()),
            nn.Linear(in_features=64, out_features=10),
        )

    def forward(self, x):
        return self.main(x.view(x.shape[0], -1))


def classification_metrics(num_classes):
    """Precision and so on over the whole data set.

    was: a TrainerCallback with four methods: on_training_run_start and on_evaluation_run_start moved the metrics to
    the device, on_eval_step_end updated them, on_eval_epoch_end computed, recorded and reset them.
    """
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "precision": MulticlassPrecision(num_classes),
            "recall": MulticlassRecall(num_classes),
        }
    )


class CountsEpochs(Callback):
    """was: a TrainerCallback with `def on_training_run_epoch_end(self, trainer, **kwargs)`."""

    def __init__(self):
        self.epochs = 0

    def on_epoch_end(self, trainer):
        self.epochs += 1

    def get_state(self):  # new, so that a resumed run continues to count
        return {"epochs": self.epochs}

    def update_state(self, state):
        self.epochs = state["epochs"]


def main():
    """Train and test; returns the trainer and the metrics of the test."""
    seed_everything(0)
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target))
    train_dataset, validation_dataset, test_dataset = random_split(dataset, [1197, 300, 300])

    model = DigitsModel()
    module = SupervisedModule(
        model,
        nn.CrossEntropyLoss(),
        optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        train_dataset=train_dataset,
        val_dataset=validation_dataset,
        test_dataset=test_dataset,
        scheduler=partial(OneCycleLR, max_lr=0.2, total_steps=placeholders.TOTAL_STEPS),
        metrics=classification_metrics(10),
    )
    # was: trainer = Trainer(model, loss_func=..., optimizer=..., callbacks=(ClassificationMetricsCallback(...), ...))
    #      trainer.train(train_dataset=..., eval_dataset=..., num_epochs=6, per_device_batch_size=32,
    #                    create_scheduler_fn=partial(OneCycleLR, max_lr=0.2,
    #                        epochs=TrainerPlaceholderValues.NUM_EPOCHS,
    #                        steps_per_epoch=TrainerPlaceholderValues.NUM_UPDATE_STEPS_PER_EPOCH))
    args = TrainerArguments(
        epochs=6,
        per_device_train_batch_size=32,
        val_batch_size=64,
        clip_grads=False,  # there, nothing is clipped unless gradient_clip_value is given
        output_dir="runs/accelerated",
    )
    trainer = Trainer(
        module,
        args,
        callbacks=[CountsEpochs, callbacks.BestCheckpoint("val/accuracy", mode="max")],
        # was: callbacks=(..., SaveBestModelCallback(watch_metric="accuracy", greater_is_better=True))
    )
    trainer.train()
    return trainer, trainer.test().metrics  # was: trainer.evaluate(dataset=test_dataset, per_device_batch_size=64)


if __name__ == "__main__":
    _, results = main()
    for name, value in results.items():
        print(f"{name} {float(value):.3f}")
