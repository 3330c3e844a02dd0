"""Train with differential privacy, and measure its cost: AUC and accuracy against epsilon.

    python examples/private.py
    python examples/private.py --data insurance --epsilons 3 1 --epochs 5 --runs 1

Two real data sets, each trained without privacy and within several budgets: 16,000 person-years of the RAND Health
Insurance Experiment (does a person see a doctor this year?) and scikit-learn's handwritten digits. On the first,
privacy costs almost no accuracy, because it is large. On the second, it costs a lot. Each run draws new noise, so the
script trains several times for each budget. It takes one to two minutes.
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from private_curves import draw_costs
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from statsmodels.datasets import randhie
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainstack import (
    DefaultCheckpointerArguments,
    DifferentialPrivacyArguments,
    ModuleInterface,
    Trainer,
    TrainerArguments,
    seed_everything,
)
from trainstack.auditing import audit, audit_module

# The divisor of each column. The numbers follow from the meaning of the columns, such as the logarithm of a percentage,
# so they are public constants. Means and deviations of the rows would be a release of private data.
INSURANCE_SCALES = {
    "lncoins": 5,  # ln(1 + coinsurance in percent)
    "idp": 1,  # has an individual deductible plan, 0 or 1
    "lpi": 10,  # ln of a yearly payment in dollars
    "fmde": 10,  # ln of a deductible in dollars
    "physlm": 1,  # is limited physically, 0 or 1
    "disea": 30,  # number of chronic diseases
    "hlthg": 1,  # says that the own health is good,
    "hlthf": 1,  # fair,
    "hlthp": 1,  # or poor
}


class Insurance(ModuleInterface):
    """Predicts whether a person sees a doctor this year. A row is a person-year, and privacy is that of a row."""

    metric, guessing = "AUC", 0.5
    batch_size, epochs, delta = 1000, 10, 1e-5

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(len(INSURANCE_SCALES), 32), nn.Tanh(), nn.Linear(32, 2))
        rows: Any = randhie.load_pandas().data
        columns = [torch.tensor(rows[name].to_numpy()) / scale for name, scale in INSURANCE_SCALES.items()]
        inputs = torch.stack(columns, dim=1).float()
        saw_a_doctor = torch.tensor(rows["mdvis"].to_numpy() > 0).long()
        self.train_data, self.val_data = split(inputs, saw_a_doctor, 16000)

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.train_data, batch_size=batch_size, sampler=sampler(self.train_data))

    def get_val_dataloaders(self, sampler, batch_size):
        return DataLoader(self.val_data, batch_size=batch_size, sampler=sampler(self.val_data))

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return [torch.optim.Adam(self.parameters(), lr=1e-2)], []

    def train_step(self, global_step, batch, device):
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs), labels)

    def val_step(self, global_step, batch, device):
        inputs, labels = batch
        scores = self.model(inputs)
        return F.cross_entropy(scores, labels), scores, labels

    def on_end_val_epoch(self, global_step, losses, scores, labels, key="default"):
        self.log("val/quality", roc_auc_score(labels.cpu(), (scores[:, 1] - scores[:, 0]).cpu()))


class Digits(Insurance):
    """Predicts a digit, by the same steps, with another model and another metric."""

    metric, guessing = "accuracy", 0.1
    batch_size, epochs, delta = 256, 30, 1e-4

    def __init__(self):
        ModuleInterface.__init__(self)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        data: Any = load_digits()
        images = torch.tensor(data.data, dtype=torch.float32) / 16  # pixels are 0 to 16 by definition
        self.train_data, self.val_data = split(images, torch.tensor(data.target), 1437)

    def on_end_val_epoch(self, global_step, losses, scores, labels, key="default"):
        self.log("val/quality", (scores.argmax(dim=1) == labels).float().mean())


TASKS = {"insurance": Insurance, "digits": Digits}


def split(inputs, labels, train):
    """Training and held-out rows, the same in every run."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    return [TensorDataset(inputs[part], labels[part]) for part in (order[:train], order[train:])]


def arguments(name, epsilon, output_dir, epochs=None, device="auto"):
    """The arguments for `name`: within `epsilon`, or without privacy if it is None."""
    task = TASKS[name]
    private = None
    if epsilon is not None:
        telemetry = {"loss": (0, 3)}  # recorded as "train/loss", with noise; otherwise there is no training loss
        private = DifferentialPrivacyArguments(delta=task.delta, target_epsilon=epsilon, telemetry=telemetry)
    return TrainerArguments(
        backend="sp" if private is None else "sp-dp",
        differential_privacy_args=private,
        epochs=task.epochs if epochs is None else epochs,
        train_batch_size=task.batch_size,
        val_batch_size=5000,
        output_dir=output_dir,
        overwrite=True,  # of an earlier try in the same folder; its privacy ledger stays
        device=device,
        writers=["csv"],
        progress="none",
        checkpointer_args=DefaultCheckpointerArguments(every_n_epochs=10),
    )


def train(name, args):
    """Train once; returns the trainer and the metric on the held-out rows."""
    seed_everything(0)  # the first weights; noise and samples of a private run come from the operating system
    trainer = Trainer(TASKS[name](), args)
    trainer.train()
    return trainer, float(trainer.history.get_latest_metric("val/quality"))


def compare(name, given):
    """Train without privacy, and several times within each budget.

    Returns the metric without privacy, (epsilon spent, metrics) for each budget, and the last trainer.
    """

    def run(epsilon, folder):
        return train(name, arguments(name, epsilon, given.output_dir / name / folder, given.epochs, given.device))

    metric = TASKS[name].metric
    trainer, without = run(None, "not-private")
    print(f"{name}: {metric} {without:.3f} without privacy", flush=True)
    points = []
    for epsilon in given.epsilons:
        runs = [run(epsilon, f"epsilon-{epsilon:g}/run-{number}") for number in range(1, given.runs + 1)]
        trainer, spent = runs[-1][0], runs[-1][0].privacy_statement().epsilon
        points.append((spent, [quality for _, quality in runs]))
        print(f"{name}: {metric} {fmean(points[-1][1]):.3f} at epsilon {spent:.3f}", flush=True)
    return without, points, trainer


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train with differential privacy, and measure its cost.")
    parser.add_argument("--data", choices=TASKS, nargs="+", default=list(TASKS), help="default: both")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 3.0, 1.0, 0.5], help="default: 8 3 1 0.5")
    parser.add_argument("--runs", type=int, default=5, help="private runs for each epsilon (default: 5)")
    parser.add_argument("--epochs", type=int, help="default: 10 for insurance, 30 for digits")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/private"))
    parser.add_argument("--picture", type=Path, help="default: cost-of-privacy.png in the output directory")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: auto)")
    given = parser.parse_args()
    panels, statements = {}, []
    for name in given.data:
        without, points, trainer = compare(name, given)
        task, module = TASKS[name], cast(Any, trainer.module)
        rows = len(module.train_data)
        panels[f"{name}: {rows:,} rows, delta {task.delta:g}"] = (task.metric, without, task.guessing, points)
        statements.append(f"{name}, the last run:\n{trainer.privacy_statement().text}")
    picture = given.picture or given.output_dir / "cost-of-privacy.png"
    draw_costs(picture, panels)
    print("", *statements, sep="\n")
    tried: dict[str, Any] = {name: arguments(name, 1.0, given.output_dir, device=given.device) for name in given.data}
    for name, args in tried.items():
        print(f"\n{audit_module(TASKS[name](), args, rounds=2).text}")
    print(f"\n{audit(tried[given.data[-1]].differential_privacy_args).text}")
    print(f"\nThe picture: {picture}")


if __name__ == "__main__":
    main()
