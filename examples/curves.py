"""Read the metrics.csv of finished runs and draw them with matplotlib."""

import csv
from collections import defaultdict

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen

from matplotlib import pyplot as plt

COLOURS = {"sp": "#0072B2", "sp-bf16": "#E69F00", "sp-amp": "#009E73"}
MARKS = {"sp": "o", "sp-bf16": "s", "sp-amp": "^"}


def read_metrics(folder):
    """The metrics of the run in `folder`: by name, a list of steps and a list of values."""
    metrics = defaultdict(lambda: ([], []))
    with (folder / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            steps, values = metrics[row["name"]]
            steps.append(int(row["step"]))
            values.append(float(row["value"]))
    return metrics


def draw_curves(folder, backends, killed_at):
    """Write `folder`/curves.png: loss and accuracy of the backends, and the interrupted run over the unbroken one."""
    runs = {backend: read_metrics(folder / backend) for backend in backends}
    resumed = read_metrics(folder / "interrupted")
    figure, (loss, accuracy, both) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for backend, run in runs.items():
        loss.plot(*run["train/loss"], color=COLOURS[backend], label=backend)
        accuracy.plot(*run["val/accuracy"], color=COLOURS[backend], marker=MARKS[backend], markersize=4, label=backend)
    loss.set(title="One module, three backends", ylabel="training loss")
    accuracy.set(title="Held-out digits", ylabel="validation accuracy", ylim=(0, 1.02))

    both.plot(*runs["sp"]["train/loss"], color="0.7", linewidth=5, label="unbroken")
    both.plot(*resumed["train/loss"], color="#D55E00", linewidth=1.2, label="killed and resumed")
    both.axvline(killed_at, color="0.3", linestyle=":", label=f"resumed after step {killed_at}")
    both.set(title="Killed with SIGKILL, then resumed", ylabel="training loss")
    for axes in (loss, accuracy, both):
        axes.set_xlabel("global step")
        axes.grid(alpha=0.25)
        axes.legend(edgecolor="none", framealpha=0.9)
    picture = folder / "curves.png"
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture
