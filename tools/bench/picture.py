"""`python -m tools.bench.picture FIGURES.json... PICTURE.svg`: draw the ratios of `--json` as bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib import rc_context
from matplotlib.figure import Figure


def draw(figures: Sequence[Path], picture: Path) -> None:
    """Draw a group of bars for each workload: CPU time of a step as a multiple of that of the plain loop."""
    workloads = {name: w for path in figures for name, w in json.loads(path.read_text("utf-8"))["workloads"].items()}
    with rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 1.6 * len(workloads) + 1), layout="constrained")
        for axes, (name, workload) in zip(
            figure.subplots(len(workloads), 1, squeeze=False)[:, 0], workloads.items(), strict=True
        ):
            contenders = workload["contenders"]
            raw = contenders["raw"]["cpu_seconds"]
            shown = {key: c["cpu_seconds"] for key, c in contenders.items() if key not in ("raw", "null")}
            ratios = {k: median(mine / its for mine, its in zip(s, raw, strict=True)) for k, s in shown.items()}
            bars = axes.barh(
                list(ratios), list(ratios.values()), color=["C0" if k.startswith("trains") else "0.6" for k in ratios]
            )
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
            axes.axvline(1.0, color="black", linewidth=1)
            axes.invert_yaxis()
            axes.margins(x=0.12)
            axes.tick_params(labelsize=8)
            axes.set_title(f"{name}: {workload['title']}", fontsize=9, loc="left")
        axes.set_xlabel("CPU time a step, the plain loop being 1", fontsize=8)
        figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw([Path(path) for path in sys.argv[1:-1]], Path(sys.argv[-1]))
