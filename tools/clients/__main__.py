"""Run the scripts of the folders next to this file against the real packages, and print a table.

    make clients                              all scripts, in three environments below build/clients/
    make clients ARGS="--only timm peft"      those whose name contains one of these
    make clients ARGS="--restart"             all, also those that have passed before
    make clients ARGS="--list"                the scripts and their last results, without running them
    python -m tools.clients --python main=PATH streaming=PATH   with interpreters that have the packages already

Each script runs in a separate process and folder, with a time limit. Each result is written immediately to
build/clients/results.json. A passed script is not run again until its text or the library changes. A script with a line
`# expected to fail: reason` has to fail. The exit status is 1 if a result is not as expected.

The wheel of torchvision for CUDA does not load its compiled operators with torch for the CPU. In such an environment
the scripts get `nms` in Python from the folder operators/, and the table has a line about it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent
WORK = ROOT / "build" / "clients"
LIMIT_S = 600.0
OPERATORS = SCRIPTS / "operators"
MARK = "# expected to fail: "

# Folders whose packages conflict with those of others; all other folders share "main".
ENVIRONMENTS = {"streaming": "streaming", "trackers": "trackers"}
PINS = {name: SCRIPTS / f"{name}.txt" for name in ("main", "streaming", "trackers")}
# Packages that all scripts need do not count as clients.
COMMON = {"torch", "numpy", "trainstack", "tools"}
# The packages of trackers by the name of the script, which does not import them, or not first.
TRACKERS = {
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
# Prints the distribution of a package; of several, such as mlflow and mlflow-skinny, the one with the shortest name.
VERSION = """
import sys
from importlib.metadata import packages_distributions, version
name = min(packages_distributions()[sys.argv[1]], key=len)
print(name, version(name))
"""

# Prints the versions if torchvision is installed and does not load its operators.
PROBE = """
from importlib.metadata import version
from importlib.util import find_spec
if find_spec("torchvision"):
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        print("torchvision", version("torchvision"), "with torch", version("torch"))
"""

Row = dict[str, str | float]


def scripts() -> list[Path]:
    """The scripts, sorted by folder and name."""
    found = SCRIPTS.glob("*/*.py")
    others = {"__init__", "common", "sitecustomize"}
    return sorted(path for path in found if path.stem not in others)


def name_of(script: Path) -> str:
    """Folder and name, such as `vision/timm_mixup`."""
    return f"{script.parent.name}/{script.stem}"


def package_of(script: Path) -> str | None:
    """The package of the client: the first import outside the standard library and `COMMON`."""
    if script.stem.startswith("use_"):
        return TRACKERS[script.stem.removeprefix("use_")]
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in (name.partition(".")[0] for name in names):
            if name not in COMMON | sys.stdlib_module_names:
                return name
    return None


def expected_failure(script: Path) -> str | None:
    """The reason in the mark of the script; None without a mark."""
    lines = script.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), None)


def interpreter(environment: str, given: dict[str, str]) -> str:
    """The Python of an environment, which is made if it is missing or has other pins."""
    if environment in given:
        return given[environment]
    folder, pins = WORK / environment, PINS[environment]
    python, stamp = folder / "bin" / "python", folder / ".stamp"
    if not stamp.exists() or stamp.read_bytes() != pins.read_bytes():
        print(f"[setup] {environment}: installing {pins.relative_to(ROOT)} (minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), "torch"], check=True)
        subprocess.run([*pip, "--requirement", str(pins), "--editable", str(ROOT)], check=True)
        stamp.write_bytes(pins.read_bytes())
    return str(python)


@functools.cache
def added_operators(python: str) -> str:
    """A note that scripts of an interpreter get `nms`; empty if torchvision loads or is not installed."""
    probed = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if not probed.stdout:
        return ""
    return (
        f"{probed.stdout.strip()} does not load its compiled operators: nms is that of tools/clients/{OPERATORS.name}/"
    )


def run(script: Path, python: str, limit_s: float) -> tuple[str, str]:
    """Run one script in a temporary folder; returns the result and the end of its output."""
    paths = [OPERATORS, ROOT, ROOT / "src"] if added_operators(python) else [ROOT, ROOT / "src"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HOME": folder,  # not the caches of the user
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [python, "-m", f"tools.clients.{script.parent.name}.{script.stem}", folder],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # to kill its children, too
        )
        with process:
            try:
                output = process.communicate(timeout=limit_s)[0]
            except subprocess.TimeoutExpired:
                return "FAILED", f"took more than {limit_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return ("passed" if process.returncode == 0 else "FAILED"), output[-4000:]


def judged(result: str, output: str, reason: str | None) -> tuple[str, str]:
    """The result, in which a marked script has to fail, and a remark."""
    if reason is None:
        return result, output if result == "FAILED" else ""
    if result == "passed":
        return "FAILED", "is marked as expected to fail, and passes: remove the mark"
    return "expected to fail", reason


def client_of(script: Path, python: str) -> str:
    """Name and version of the distribution of the client."""
    package = package_of(script)
    if package is None:
        return "-"
    asked = subprocess.run([python, "-c", VERSION, package], capture_output=True, text=True)
    return asked.stdout.strip() or f"{package} (not installed)"


def digest(script: Path) -> str:
    """A hash of all that determines a result: the script, common files, operators, pins and the library."""
    environment = ENVIRONMENTS.get(script.parent.name, "main")
    files = [script, *sorted(script.parent.glob("common.py")), *sorted(OPERATORS.glob("*.py")), PINS[environment]]
    files += sorted((ROOT / "src").rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()[:16]


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as lines of Markdown."""
    yield "| script | client | result | seconds |"
    yield "|---|---|---|---|"
    for row in rows:
        note = f": {row['note']}" if row["result"] == "expected to fail" else ""
        yield f"| {row['name']} | {row['client']} | {row['result']}{note} | {row['seconds']:.0f} |"
    for said in sorted({str(row["added"]) for row in rows if row.get("added")}):
        yield f"\n{said}"


def run_all(chosen: list[Path], kept: dict[str, Row], options: argparse.Namespace) -> list[Row]:
    """Run the scripts without a valid result, and write each result immediately."""
    rows, given = [], dict(pair.split("=", 1) for pair in options.python)
    for script in chosen:
        name, seal = name_of(script), digest(script)
        row = kept.get(name)
        if row is None or row["digest"] != seal or row["result"] == "FAILED":
            python = interpreter(ENVIRONMENTS.get(script.parent.name, "main"), given)
            began = time.monotonic()
            result, note = judged(*run(script, python, options.limit), expected_failure(script))
            seconds = time.monotonic() - began
            row = {"name": name, "client": client_of(script, python), "result": result, "seconds": seconds}
            row |= {"note": note, "digest": seal, "added": added_operators(python)}
            kept[name] = row
            (WORK / "results.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(f"{name:<44} {result:<16} {row['client']:<28} {seconds:5.0f} s", flush=True)
            if result == "FAILED":
                print(note, flush=True)
        rows.append(row)
    return rows


def main() -> int:
    """Run the scripts; returns 1 if a result is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="scripts whose name contains one of these"
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help=f"interpreters of {', '.join(PINS)} (default: new environments)",
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="time limit of a script in seconds")
    parser.add_argument("--restart", action="store_true", help="ignore earlier results")
    parser.add_argument("--list", action="store_true", help="print the scripts without running them")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    results = WORK / "results.json"
    kept: dict[str, Row] = {}
    if results.exists() and not options.restart:
        kept = json.loads(results.read_text(encoding="utf-8"))
    chosen = [path for path in scripts() if any(text in name_of(path) for text in options.only)]
    if options.list:
        rows = [kept.get(name_of(path)) or _not_run(path) for path in chosen]
    else:
        rows = run_all(chosen, kept, options)
    print(*table(rows), sep="\n")
    counts = {
        result: sum(row["result"] == result for row in rows) for result in dict.fromkeys(r["result"] for r in rows)
    }
    print(f"\n{len(rows)} scripts: " + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return int(any(row["result"] == "FAILED" for row in rows))


def _not_run(script: Path) -> Row:
    return {
        "name": name_of(script),
        "client": package_of(script) or "-",
        "result": "not run",
        "seconds": 0.0,
        "note": "",
    }


if __name__ == "__main__":
    sys.exit(main())
