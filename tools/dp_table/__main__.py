"""Reproduce published accuracies of private training, and print them with ours.

    make dp-table                                              all rows, 3 runs each; about two hours on one core
    python -m tools.dp_table --rows scatternet-linear --runs 1
    python -m tools.dp_table --smoke                           a few steps on scikit-learn's digits

Every finished run is a line of `results.jsonl` in the output directory and is not repeated. A killed run continues from
its newest checkpoint. npm downloads MNIST into the cache. The tool needs numpy, scikit-learn and trainstack.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev

from tools.dp_table.images import digits, mnist
from tools.dp_table.rows import ROWS, Row
from tools.dp_table.training import DELTA, Result, run

HEAD = "| | published accuracy | ours | runs | published epsilon | epsilon of our accountant (prv / rdp) |"
RULE = "| --- | --- | --- | --- | --- | --- |"


def finished(path: Path) -> dict[tuple[str, int], Result]:
    """The results in `path`, by row and seed."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return {(line.pop("row"), line.pop("seed")): Result(**line) for line in lines}


def line_of(row: Row, results: list[Result]) -> str:
    """One row of the table."""
    if not results:
        return f"| {row.title} | {row.published_accuracy} | not run | 0 | {row.published_epsilon:.2f} | |"
    accuracies = [result.accuracy for result in results]
    ours = f"{fmean(accuracies):.2f}" + (f" ± {stdev(accuracies):.2f}" if len(results) > 1 else "")
    epsilon, rdp = (max(values) for values in zip(*((r.epsilon, r.epsilon_rdp) for r in results), strict=True))
    return (
        f"| {row.title} | {row.published_accuracy} | {ours} | {len(results)} | {row.published_epsilon:.2f} | "
        f"{epsilon:.2f} / {rdp:.2f} |"
    )


def main() -> None:
    """Train the missing runs, then print the table."""
    parser = argparse.ArgumentParser(
        prog="make dp-table", description="Published accuracies of private training, and ours."
    )
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=list(ROWS), help="default: all")
    parser.add_argument("--runs", type=int, default=3, help="runs of each row (default: 3)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/dp-table"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/dp-table"), help="images and features: 0.7 GB")
    parser.add_argument("--smoke", action="store_true", help="3 steps of each row on scikit-learn's digits")
    given = parser.parse_args()
    path = given.output_dir / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    images = digits() if given.smoke else mnist(given.cache)
    for seed in range(1, given.runs + 1):
        for name in given.rows:
            if (name, seed) in finished(path):
                continue
            begun = time.monotonic()
            folder = given.output_dir / name / f"run-{seed}"
            result = run(ROWS[name], seed, images, given.cache, folder, max_steps=3 if given.smoke else None)
            with path.open("a") as out:
                out.write(json.dumps({"row": name, "seed": seed, **asdict(result)}) + "\n")
            seconds = time.monotonic() - begun
            print(f"{name}, run {seed}: {result.accuracy:.2f} % in {seconds:.0f} s", flush=True)
    results = finished(path)
    print(f"\n{images.name}, delta {DELTA:g}\n\n{HEAD}\n{RULE}")
    for name in given.rows:
        print(line_of(ROWS[name], [result for (row, _), result in sorted(results.items()) if row == name]))


if __name__ == "__main__":
    main()
