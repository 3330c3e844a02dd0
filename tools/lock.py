"""Write constraints.txt: the versions that `pip` resolves for all extras together, in a temporary environment.

`make lock` runs this. Python 3.10 has a separate file, constraints-3.10.txt, because it has no new versions of numpy:
`make lock PYTHON=python3.10`. The pin of torch does not change; `make lock TORCH=2.14.0` changes it. The file has names
and versions only, so that it works with any package index: no local version such as `+cpu`, no index lines, no hashes,
no URLs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / ("constraints.txt" if sys.version_info >= (3, 11) else "constraints-3.10.txt")
UNPINNED = (
    "wandb",
    "mlflow",
    "trackio",
    "remote",
    "gcs",
    "comet",
    "clearml",
    "aim",
    "dvclive",
    "prometheus",
    "notebook",
)
"""Extras that development and CI do not install: tests use stand-ins for these packages."""

PIN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[^\s+]+)(\+\S+)?")


def main() -> None:
    """Resolve, freeze, clean and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", default="", help="the version of torch to pin (default: the one pinned now)")
    torch = parser.parse_args().torch or current_torch()
    pins = clean(resolve(torch))
    CONSTRAINTS.write_text(header() + "".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    print(f"wrote {CONSTRAINTS.name}: {len(pins)} pins, torch=={torch}")


def header() -> str:
    """The first lines of the file, with the version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"# Written by `make lock` with Python {version}: do not edit. All packages of the extras, pinned.\n"
        "# Development and CI install with these; users of the library get the ranges in pyproject.toml.\n"
    )


def current_torch() -> str:
    """Read the pinned version of torch."""
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        sys.exit("constraints.txt does not pin torch: say which version to pin, as in `make lock TORCH=2.13.0`.")
    return found.group(1)


def known_extras() -> list[str]:
    """The names of the extras in pyproject.toml. Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", table, re.MULTILINE)


def resolve(torch: str) -> list[str]:
    """Install everything into a temporary environment and return the lines of `pip freeze`."""
    extras = ",".join(extra for extra in known_extras() if extra not in UNPINNED)
    with tempfile.TemporaryDirectory(prefix="lock-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        # The new environment has an old setuptools. If a package needs it, pip installs the newest version.
        subprocess.run([*pip, "uninstall", "-qq", "-y", "setuptools"], check=True)
        # pip 23.0 of Python 3.10.13 does not resolve the extras within 7 minutes; pip 26.3 takes two.
        subprocess.run([*pip, "install", "-qq", "--upgrade", "pip"], check=True)
        print(f"resolving torch=={torch} and .[{extras}]: one to two minutes", flush=True)
        subprocess.run([*pip, "install", "-qq", f"torch=={torch}", f"{ROOT}[{extras}]"], check=True)
        subprocess.run([*pip, "check"], check=True)
        frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    return frozen.splitlines()


def clean(frozen: list[str]) -> list[str]:
    """Keep `name==version`, normalised and sorted; drop the project, pip, and local version labels.

    Also drop the packages of CUDA. torch requires exact versions of them, and another torch needs other ones.
    """
    pins = {}
    for line in frozen:
        match = PIN.fullmatch(line.strip())
        if match is None:
            if line.startswith("trainstack @"):
                continue
            sys.exit(f"pip freeze wrote {line!r}, not name==version: every pin has to work on any machine.")
        name = re.sub(r"[-_.]+", "-", match["name"]).lower()
        if name not in ("pip", "triton") and not name.startswith(("cuda-", "nvidia-")):
            pins[name] = match["version"]
    return [f"{name}=={pins[name]}" for name in sorted(pins)]


if __name__ == "__main__":
    main()
