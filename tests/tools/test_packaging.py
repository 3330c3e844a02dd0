"""Files that repeat the versions, names and dependencies of pyproject.toml agree with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainstack
from tools.lock import known_extras

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CONDA_NAMES = {"torch": "pytorch", "xxhash": "python-xxhash"}
"""The packages of conda-forge that have another name than on the Python package index."""


def value(key: str) -> str:
    """The string that pyproject.toml assigns to `key`."""
    found = re.search(rf'^{key} = "(.*)"$', PROJECT, re.M)
    assert found is not None, key
    return found[1]


def requirements(text: str) -> dict[str, str]:
    """Names and ranges of the quoted requirements in `text`."""
    return dict(re.findall(r'"([\w-]+)([<>=][^"]*)"', text))


def dependencies() -> dict[str, str]:
    return requirements(PROJECT.partition("\ndependencies = [\n")[2].partition("\n]")[0])


def pythons() -> list[str]:
    """The classifiers of supported versions."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def setting(name: str) -> str:
    """The default of a variable of the Makefile."""
    found = re.search(rf"^{name} \?= ?(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert found is not None, name
    return found[1]


def test_only_the_package_has_the_version() -> None:
    assert 'dynamic = ["version"]' in PROJECT
    assert value("path") == "src/trainstack/__init__.py"
    assert not re.search(r"^version\b", PROJECT + (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)


def test_the_conda_recipe_agrees_with_pyproject() -> None:
    recipe: dict[str, Any] = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == trainstack.__version__
    assert recipe["package"] == {"name": value("name"), "version": "${{ version }}"}
    python = {"python": value("requires-python")}
    runs = dict(line.split() for line in recipe["requirements"]["run"])
    assert runs == python | {CONDA_NAMES.get(name, name): needed for name, needed in dependencies().items()}
    build = re.search(r'^requires = \["(\w+)(.*?)"\]', PROJECT, re.M)
    assert build is not None
    assert dict(line.partition(" ")[::2] for line in recipe["requirements"]["host"]) == {
        **python,
        "pip": "",
        build[1]: build[2],
    }
    assert recipe["build"]["python"]["entry_points"] == [f"trainstack = {value('trainstack')}"]
    about = recipe["about"]
    assert (about["homepage"], about["documentation"]) == (value("Homepage"), value("Documentation"))
    assert (about["summary"], about["license"]) == (value("description"), value("license"))


def test_workflow_and_makefile_have_the_versions_of_pyproject() -> None:
    assert setting("PYTHONS").split() == [f"python{version}" for version in pythons()]
    assert value("requires-python") == f">={pythons()[0]}"
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["versions"]["strategy"]["matrix"]
    assert matrix["python"] == pythons()
    assert matrix["torch"] == [dependencies()["torch"].removeprefix(">=") + ".0", ""]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {word for line in lines for word in re.findall(r"^make ([\w-]+)", line)}
    assert targets
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def test_both_locks_pin_the_same_torch_and_all_required_packages() -> None:
    new, old = pinned("constraints.txt"), pinned("constraints-3.10.txt")
    assert new["torch"] == old["torch"]
    for pins in (new, old):
        assert {*dependencies(), "pytest", "coverage", "twine", "build"} <= {*pins}


@pytest.mark.processes
@pytest.mark.parametrize(("settings", "folder"), [([], ".venv"), (["TORCH=2.10.0"], ".venv-torch2.10.0")])
def test_make_has_an_environment_for_each_torch(settings: list[str], folder: str) -> None:
    command = ["make", "--dry-run", "--always-make", "test-fast", *settings]
    clean = {name: text for name, text in os.environ.items() if name not in ("MAKEFLAGS", "PYTHON", "TORCH")}
    shown = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=True).stdout
    assert f"\n{folder}/bin/python -m pytest -n" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("sed ")]
    pins = subprocess.run(line.partition(" > ")[0], shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    torch = f"torch=={'2.10.0' if settings else pinned('constraints.txt')['torch']}"
    expected = re.sub(r"^torch==.*", torch, (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    assert pins.stdout == expected


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) exec {real} "$@" ;;
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >> log ;;
  "-m pip") for word; do package=$word; done; echo "pip $package" >> log; [ "$package" != "$BREAKS" ] ;;
  *) echo "run $*" >> log ;;
esac
"""


@pytest.mark.processes
def test_the_demo_installs_less_than_the_tests_and_an_interrupted_installation_is_not_trusted(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-3.10.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON.format(real=sys.executable))
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    log = tmp_path / "log"

    def make(target: str, breaks: str = "") -> list[str]:
        log.write_text("")
        command = ["make", target, "ARGS="]
        subprocess.run(
            command, cwd=tmp_path, env=environment | {"BREAKS": breaks}, capture_output=True, check=not breaks
        )
        return log.read_text().splitlines()

    demo, tests = ".[sklearn,dp]", ".[dev,demo,docs,dp,tensorboard]"
    runs, tested = "run examples/demo.py", "run -m pytest -n 2 --dist worksteal --fast"
    compiled = "run -m compileall -q -q -j 0 .venv/lib"
    assert make("demo") == ["venv", "pip torch", f"pip {demo}", compiled, runs]
    assert make("demo") == [runs]
    assert make("test-fast") == [f"pip {tests}", tested]
    assert make("test-fast") == [tested]
    assert make("demo") == [runs]
    for target, last in (("demo", demo), ("test-fast", tests)):
        changed = time.time() + 10
        os.utime(tmp_path / "constraints.txt", (changed, changed))
        make(target, breaks=last)
        os.utime(tmp_path / "constraints.txt", (0, 0))
        assert make("demo") == ["venv", "pip torch", f"pip {demo}", compiled, runs], target
        assert make("test-fast") == [f"pip {tests}", tested]
    changed = time.time() + 10
    os.utime(tmp_path / "constraints.txt", (changed, changed))
    assert make("test-fast") == ["pip torch", f"pip {demo}", compiled, f"pip {tests}", tested]


def test_the_page_on_installation_has_each_extra() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), re.M)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(known_extras())
