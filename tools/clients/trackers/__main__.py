"""Runs the scripts of this folder whose packages are installed, each in a process, and prints a table."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

PACKAGES = {
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "trackio": "trackio",
    "comet": "comet_ml",
    "clearml": "clearml",
    "aim": "aim",
    "dvclive": "dvclive",
    "prometheus": "prometheus_client",
    "notebook": "nbclient",
}
PATIENCE_S = 600.0


def run_script(name: str) -> subprocess.CompletedProcess[str]:
    """Run the script of one tracker in a folder that is deleted afterwards."""
    root = Path(__file__).resolve().parents[3]
    paths = [str(root), str(root / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HOME": folder}
        return subprocess.run(
            [sys.executable, "-m", f"tools.clients.trackers.use_{name}", folder],
            cwd=folder,  # some packages write into the current folder
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )


def main() -> int:
    """Run the scripts; returns how many have failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PACKAGES)}; all by default")
    failed = 0
    for name in parser.parse_args().names or PACKAGES:
        package = PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name:<12} skipped: {package} is not installed", flush=True)
            continue
        began = time.monotonic()
        ended = run_script(name)
        result = "passed" if ended.returncode == 0 else "FAILED"
        print(f"{name:<12} {result}  {package} {version(package)}  {time.monotonic() - began:.0f} s", flush=True)
        if ended.returncode:
            failed += 1
            print(ended.stderr[-4000:], flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
