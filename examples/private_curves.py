"""Draw the cost of privacy, with matplotlib."""

from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen

from matplotlib import pyplot as plt


def draw_costs(picture, tasks):
    """Write `picture`: one panel a task, its metric against epsilon, and a line for training without privacy.

    `tasks` has for each title the metric's name, its value without privacy, its value for guesses, and pairs of
    (epsilon spent, values of several runs). The picture has their mean and their range.
    """
    figure, panels = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4), layout="constrained", squeeze=False)
    for axes, (title, (metric, without, guessing, points)) in zip(panels[0], tasks.items(), strict=True):
        axes.axhline(without, color="0.3", linestyle="--", label=f"without privacy: {without:.3f}")
        axes.axhline(guessing, color="0.7", linestyle=":", label=f"guessing: {guessing:g}")
        epsilons, values = zip(*sorted(points), strict=True)
        axes.vlines(
            epsilons, [min(v) for v in values], [max(v) for v in values], color="#0072B2", linewidth=3, alpha=0.4
        )
        axes.plot(epsilons, [fmean(v) for v in values], color="#0072B2", marker="o", label="private: mean and range")
        axes.set(title=title, xlabel="epsilon (less is more private)", ylabel=metric, xscale="log")
        axes.set_xticks(epsilons, [f"{epsilon:.2g}" for epsilon in epsilons])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(edgecolor="none", framealpha=0.9, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
