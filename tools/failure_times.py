"""Measure how long the other rank runs after one rank has failed: a table over launchers, ways and places.

    python tools/failure_times.py                  measure all cases, three at a time, and print the table
    python tools/failure_times.py --print          print the table that was measured last
    python tools/failure_times.py --only launch    measure the cases with this text in their names

The results are in `build/failure_times.json`. `TIMEOUT_S` is the time limit of collectives and of the rendezvous.
On a quiet machine no rank waits for longer than its time limit and 7 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.failing_run import HOWS, PLACES, TIMEOUT_S, measure  # noqa: E402
from tests.helpers.processes import free_port  # noqa: E402

RESULTS = ROOT / "build" / "failure_times.json"
LIMIT_S = 150.0
STARTED = ("import", "optimizers", "dataset", "save")  # two places of the start, one of the data, one of the files


def cases() -> list[tuple[str, str, str, int]]:
    """Launcher, way, place and rank of every case."""
    found = [("plain", how, "train_step", number % 2) for number, how in enumerate(HOWS)]
    found += [("plain", "RuntimeError", place, rank) for place in PLACES for rank in (0, 1)]
    found += [("plain", "SIGKILL", place, number % 2) for number, place in enumerate(PLACES)]
    found += [("plain", "sleep", place, 1 - number % 2) for number, place in enumerate(("dataset", "hook", "val_step"))]
    for launcher in ("torchrun", "launch"):
        found += [(launcher, how, "train_step", (number + 1) % 2) for number, how in enumerate(HOWS)]
        found += [(launcher, "RuntimeError", place, number % 2) for number, place in enumerate(STARTED)]
        found += [(launcher, "SIGKILL", place, 1 - number % 2) for number, place in enumerate(STARTED)]
        found += [(launcher, "sys.exit", "end", 1), (launcher, "sleep", "hook", 0), (launcher, "custom", "val_hook", 1)]
    return list(dict.fromkeys(found))


def name_of(case: tuple[str, str, str, int]) -> str:
    """The name of a case in the table."""
    launcher, how, place, rank = case
    return f"{launcher}, {how} in {place}, rank {rank}"


def measure_case(case: tuple[str, str, str, int]) -> dict[str, Any]:
    """The times of a case, in seconds: "other_s" and "all_s"."""
    for _ in range(3):  # another program may have taken the port
        with tempfile.TemporaryDirectory() as folder:
            times = measure(Path(folder), *case, port=free_port(), limit=LIMIT_S)
        if times["other_s"] != -1:
            break
    return times


def print_table(results: dict[str, Any]) -> None:
    """Print one line for each case."""
    width = max(map(len, results), default=0)
    print(f"{'case':{width}}  other rank    all   load   (seconds; timeout_s={TIMEOUT_S:g})")
    for name, times in results.items():
        print(f"{name:{width}}  {times['other_s']!s:>10}  {times['all_s']!s:>5}  {times['load']:5}")
    ended = [times["other_s"] for times in results.values() if times["other_s"] is not None]
    print(f"{len(results)} cases; the other rank ended in {len(ended)}, after {max(ended, default=0)} s at most")


def main() -> int:
    """Measure, write the results and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--print", action="store_true", dest="only_print")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=3)
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.only_print:
        with ThreadPoolExecutor(args.jobs) as pool:
            futures = {pool.submit(measure_case, case): case for case in cases() if args.only in name_of(case)}
            for future in as_completed(futures):
                times = {**future.result(), "load": round(os.getloadavg()[0], 1)}
                results[name_of(futures[future])] = times
                print(name_of(futures[future]), times["other_s"], times["all_s"], flush=True)
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(results, indent=1))
    print_table({name: results[name] for name in map(name_of, cases()) if name in results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
