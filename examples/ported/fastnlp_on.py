"""A fastNLP script with `Trainer.on`, on the measurements of 569 breast tumours that come with scikit-learn.

    python examples/ported/fastnlp_on.py

Comments show the original lines. docs/coming-from/fastnlp.md explains the differences.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from trainstack import (
    DefaultCheckpointerArguments,
    Event,
    SupervisedModule,
    Trainer,
    TrainerArguments,
    seed_everything,
)


class Tumours:
    """Items with names, as the `DataSet` of fastNLP gives them."""

    def __init__(self, measures, labels):
        self.measures, self.labels = measures, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"measures": self.measures[index], "label": self.labels[index]}


class Model(nn.Module):
    """As it was: batch keys are matched to the parameters of the method that is called."""

    def __init__(self, features, classes):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, classes))

    def train_step(self, x, target):
        return {"loss": nn.functional.cross_entropy(self.net(x), target)}

    def evaluate_step(self, x, target):
        return {"pred": self.net(x).argmax(dim=1), "target": target}


class Accuracy:  # was: class Accuracy(Metric)
    """A custom metric: `update` gets its arguments by name, as before."""

    def __init__(self):
        self.reset()

    def update(self, pred, target):
        self.right += (pred == target).sum().item()
        self.seen += len(target)

    def compute(self):  # was: def get_metric(self)
        return {"acc": self.right / self.seen}

    def reset(self):
        self.right = self.seen = 0


def tumours():
    """Training and evaluation data: each fourth tumour is in the second."""
    data = load_breast_cancer()
    measures = torch.tensor(data.data, dtype=torch.float32)
    held_out = torch.arange(len(measures)) % 4 == 0
    seen = measures[~held_out]
    measures = (measures - seen.mean(0)) / seen.std(0)
    labels = torch.tensor(data.target)
    return Tumours(measures[~held_out], labels[~held_out]), Tumours(measures[held_out], labels[held_out])


def main():
    """Train; returns the trainer and the notes of the subscribed functions."""
    seed_everything(0)
    train_data, evaluate_data = tumours()  # was: loaders, made of the data sets by prepare_torch_dataloader
    notes = []

    module = SupervisedModule(  # was: trainer = Trainer(
        Model(30, 2),  # was: model=Model(30, 2),
        None,  # the model computes its loss
        torch.optim.AdamW,  # was: optimizers=torch.optim.AdamW(model.parameters(), lr=5e-3),
        train_data,  # was: train_dataloader=...,
        evaluate_data,  # was: evaluate_dataloaders=...,
        optimizer_kwargs={"lr": 5e-3},
        forward_fn="train_step",  # was: the default, if the model has such a method
        val_forward_fn="evaluate_step",  # was: the same
        input_mapping={"measures": "x", "label": "target"},
        metrics={"": Accuracy()},  # was: metrics={"acc": Accuracy()}, recorded as acc#acc
    )
    args = TrainerArguments(
        epochs=8,  # was: n_epochs=8
        train_batch_size=16,  # was: of the loader
        val_batch_size=64,  # was: of the loader
        validate_every=-2,  # was: evaluate_every=-2
        sanity_val_steps=2,  # was: the default of run(num_eval_sanity_batch=2)
        monitor="val/acc",  # was: monitor="acc"
        monitor_mode="max",  # was: larger_better=True
        clip_grads=False,  # was: nothing is clipped without a TorchGradClipCallback
        checkpointer_args=DefaultCheckpointerArguments(checkpoint=False),  # was: no CheckpointCallback
        output_dir="runs/fastnlp",
    )
    trainer = Trainer(module, args)

    @trainer.on(Event.TRAIN_EPOCH_END, every=3)  # was: @Trainer.on(Event.on_train_epoch_end(every=3)), before Trainer()
    def note_epoch(trainer):
        notes.append(f"epoch {trainer.state.epoch}")  # was: trainer.cur_epoch_idx, which is counted from 0, too

    @trainer.on(Event.VALIDATION_END)  # was: @Trainer.on(Event.on_evaluate_end())
    def note_accuracy(trainer, results):
        notes.append(f"acc {results['val/acc']:.3f}")  # was: results["acc#acc"]

    @trainer.on(Event.BEFORE_OPTIMIZER_STEP, once=1)  # was: @Trainer.on(Event.on_before_optimizers_step(once=1))
    def note_optimizer(trainer, optimizers):
        notes.append(f"lr {optimizers[0].param_groups[0]['lr']}")

    trainer.train()  # was: trainer.run()
    return trainer, notes


if __name__ == "__main__":
    print("\n".join(main()[1]))
