"""`python -m tools.conformance`: run all cases with each trainer, print the table, and write docs/conformance.md.

Each trainer runs in a separate process, the peers with the interpreter of .venv-peers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.conformance.adapter import TRAINERS
from tools.conformance.case import all_cases
from tools.conformance.process import ROOT
from tools.conformance.report import Row, page, table

PEERS = ROOT / ".venv-peers" / "bin" / "python"
PAGE = ROOT / "docs" / "conformance.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns 1 if trainstack fails one."""
    options = _parser().parse_args(argv)
    ids = [case.id for case in all_cases()]
    unknown = set(options.case) - set(ids)
    if unknown:
        print(f"no case is called {', '.join(sorted(unknown))}. There are {', '.join(ids)}.")
        return 2
    rows = {}
    for trainer in options.trainer or TRAINERS:
        interpreter = Path(sys.executable) if trainer in ("trainstack", "naive") else PEERS
        if not interpreter.exists():
            print(f"{trainer}: skipped, {PEERS.relative_to(ROOT)} does not exist. Make it: `make conformance-peers`.")
            continue
        rows[trainer] = run_row(trainer, interpreter, options.case, options.timeout)
    print(f"\n{table(rows)}")
    if set(rows) == set(TRAINERS) and not options.case:
        PAGE.write_text(page(rows), encoding="utf-8")
        print(f"\nwrote {PAGE.relative_to(ROOT)}")
    return int(any(cell.status == "wrong" for cell in rows["trainstack"].cells.values()) if "trainstack" in rows else 0)


def run_row(trainer: str, interpreter: Path, ids: Sequence[str], timeout: float) -> Row:
    """The cells of a trainer, from a process of `interpreter`."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "row.json"
        command = [str(interpreter), "-W", "ignore", "-m", "tools.conformance.row", trainer, str(answer), *ids]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout, check=True)
        return Row.from_json(json.loads(answer.read_text(encoding="utf-8")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument(
        "--trainer", action="append", default=[], choices=[*TRAINERS, "naive"], help="only this one; can be repeated"
    )
    parser.add_argument("--case", action="append", default=[], help="only this case; can be repeated")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds for one trainer")
    return parser


if __name__ == "__main__":
    sys.exit(main())
