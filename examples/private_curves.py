"""Draw what privacy costs, with matplotlib."""

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen

from matplotlib import pyplot as plt


def draw_costs(picture, tasks):
    """Write `picture`: one panel a task, its metric against epsilon, and a line for training without privacy.

    `tasks` has for each title the metric's name, its value without privacy, what guessing would give, and pairs of
    (epsilon spent, value).
    """
    figure, panels = plt.subplots(1, len(tasks), figsize=(5.2 * len(tasks), 4), layout="constrained", squeeze=False)
    for axes, (title, (metric, without, guessing, points)) in zip(panels[0], tasks.items(), strict=True):
        axes.axhline(without, color="0.3", linestyle="--", label=f"without privacy: {without:.3f}")
        axes.axhline(guessing, color="0.7", linestyle=":", label=f"guessing: {guessing:g}")
        axes.plot(*zip(*sorted(points), strict=True), color="#0072B2", marker="o", label="private")
        axes.set(title=title, xlabel="epsilon (less is more private)", ylabel=metric, xscale="log")
        axes.set_xticks([epsilon for epsilon, _ in points], [f"{epsilon:.2g}" for epsilon, _ in points], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(edgecolor="none", framealpha=0.9, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
