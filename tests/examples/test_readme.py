"""README: its script runs as pasted, its diffs apply, its addresses and numbers agree with the project."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.examples.test_docs_code import anchors_of
from tests.helpers.patience import patience
from tools.pages import ROOT, Block, Runner, blocks_of
from tools.recording import PICTURE, script
from tools.terminal import Screen, run_in_terminal

pytestmark = pytest.mark.processes

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
SCRIPT = blocks_of(README)[0].source
DIFFS = re.findall(r"^```diff\n(.*?)^```$", TEXT, re.M | re.S)
TRAINS = "Trainer(module, args).train()\n"
INTERRUPTED = """
import contextlib

def stop(global_step):
    if global_step == 160:
        raise KeyboardInterrupt

module.on_end_train_step = stop
with contextlib.suppress(KeyboardInterrupt):
    Trainer(module, args).train()
"""
SLOWLY = """
import time

module.on_end_train_step = lambda global_step: time.sleep(0.01)
Trainer(module, args).train()
"""
NUMBER = re.compile(r"\d+\.\d+(?! s\b)")


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def settings() -> tuple[str, str, dict[str, Any]]:
    """The project's address, that of its documentation, and the settings of mkdocs.yml."""
    found = re.search(r"^\[project\.urls\].*?(?=^\[)", (ROOT / "pyproject.toml").read_text("utf-8"), re.M | re.S)
    assert found is not None
    urls = dict(re.findall(r'^(\w+) = "(.*)"$', found[0], re.M))
    assert all(url.startswith((urls["Homepage"], urls["Documentation"])) for url in urls.values())
    return urls["Homepage"], urls["Documentation"], yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def changed_by(diff: str, source: str) -> str:
    """`source` after `diff`, whose lines begin with "+ ", "- " or two spaces."""
    kept = [line[2:] for line in diff.splitlines() if not line.startswith("+")]
    made = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    before, after = "\n".join(kept) + "\n", "\n".join(made) + "\n"
    assert source.count(before) == 1, f"README's script does not have these lines once:\n{before}"
    return source.replace(before, after)


def run(runner: Runner, source: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return "".join(runner.run([Block(0, source, None)], folder))


def words_and_numbers(shown: str) -> tuple[list[str], list[float]]:
    """The words and the measured numbers of an output, without folders and times."""
    shown = re.sub(r"runs/[\w./-]+", "RUN", shown)
    shown = re.sub(r"\b\d+\.\d+ s\b", "TIME", shown)
    return NUMBER.sub("NUMBER", shown).split(), [float(number) for number in NUMBER.findall(shown)]


def test_the_script_runs_as_pasted_with_the_output_of_readme(tmp_path: Path) -> None:
    """In a terminal, epochs are rows of a table, and the progress bar is removed."""
    assert SCRIPT.count("\n") < 20
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    screen = Screen(120)  # the longest line has 113 characters
    assert run_in_terminal([sys.executable, "train.py"], tmp_path, screen, timeout_s=patience(60)) == 0
    says = TEXT.partition("prints the plan of")[2].partition("```text\n")[2].partition("```")[0]
    words, numbers = words_and_numbers(says)
    printed, measured = words_and_numbers("\n".join(screen.lines))
    assert printed == words
    assert measured == pytest.approx(numbers, rel=0.05)  # other processors round differently
    rows = [line for line in screen.lines if re.match(r" *(epoch|\d/5) ", line)]
    assert len(rows) == 6
    assert len({row.find(" s") for row in rows[1:]}) == 1


def test_a_diff_that_resumes_continues_the_run(runner: Runner, tmp_path: Path) -> None:
    resuming = changed_by(DIFFS[0], SCRIPT)
    assert resuming == script(), "the picture shows another change than README"
    run(runner, resuming.replace(TRAINS, INTERRUPTED), tmp_path)
    assert "after global step 126" in run(runner, resuming, tmp_path)


def test_a_diff_that_trains_privately_states_epsilon(runner: Runner, tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="needs the extra dp")
    private = changed_by(DIFFS[2], SCRIPT).replace("epochs=5", "max_steps=2")
    assert "delta 1e-05)-differentially private" in run(runner, private, tmp_path)


@pytest.mark.long
def test_the_killed_and_restarted_script_ends_as_an_unbroken_run(tmp_path: Path) -> None:
    """A run of two processes, started as in the second diff, ends with the same losses."""
    resuming = changed_by(DIFFS[0], SCRIPT)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    changed = changed_by(DIFFS[1], "python train.py\n").split()
    launcher = str(Path(sys.executable).with_name(changed[0]))
    commands = [[sys.executable, "train.py"], [launcher, *changed[1:]]]
    whole, two = (last_line(started(command, tmp_path)) for command in commands)
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "train.py").write_text(resuming.replace(TRAINS, SLOWLY), encoding="utf-8")
    with subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("epoch=3/5"):
                child.kill()
    assert child.returncode == -signal.SIGKILL
    (tmp_path / "train.py").write_text(resuming, encoding="utf-8")
    resumed = started([sys.executable, "train.py"], tmp_path)
    assert "resumed" in resumed
    assert last_line(resumed) == whole == two


def started(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=patience(120)
    ).stdout


def last_line(shown: str) -> list[str]:
    """The losses of the last epoch."""
    (line,) = (line for line in shown.splitlines() if line.startswith("epoch=5/5"))
    return NUMBER.findall(line)[:2]


def test_the_addresses_are_those_of_pyproject() -> None:
    project, documentation, site = settings()
    assert (site["site_url"], site["repo_url"]) == (documentation, project)
    assert f"{site['repo_url']}/{site['edit_uri']}" == f"{project}/edit/main/docs/"


def test_links_of_readme_are_absolute_and_have_targets() -> None:
    project, documentation, _ = settings()
    links = re.findall(r"\]\(([^)\s]*)\)", TEXT)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    dead = []
    for link in links:
        address, _, anchor = link.partition("#")
        if address.startswith(documentation):
            part = address.removeprefix(documentation)
            file = ROOT / "docs" / (part.rstrip("/") + ".md" if part.endswith("/") else part)
            dead += [] if file.is_file() and (not anchor or anchor in anchors_of(file)) else [link]
        elif address.startswith(project):
            kind, _, part = address.removeprefix(f"{project}/").partition("/main/")
            there = {"blob": Path.is_file, "tree": Path.is_dir}[kind]
            dead += [] if there(ROOT / part) else [link]
    assert dead == []


def test_the_numbers_of_the_benefits_are_those_of_the_commands() -> None:
    from tools.attacks.__main__ import KINDS

    kills = re.findall(r"^\| `.*?\| (\d+) \| (\d+) \| \d+ \| the same bits \|$", page("verifying"), re.M)
    assert len(kills) == 6
    total, while_saving = (sum(int(row[column]) for row in kills) for column in (0, 1))
    assert f"{total} of {total} trainings" in TEXT
    assert f"{while_saving} of them in the middle of a save" in TEXT
    passed = re.search(r"^\| passes \| (\d+ of \d+) \|", page("conformance"), re.M)
    assert passed is not None
    assert f"{passed[1]} small tests pass" in TEXT
    assert f"{len(KINDS)} kinds of user code" in TEXT


def test_every_installation_has_one_of_two_forms() -> None:
    """Installation from the package index, or from a clone, for scripts outside the package."""
    wrong = [
        f"{path.name}: {line}"
        for path in [README, *sorted((ROOT / "docs").rglob("*.md"))]
        for line in re.findall(r"pip install[^\n`]*trainstack[^\n`]*", path.read_text(encoding="utf-8"))
        if not re.match(r"pip install (?:[\w-]+ )*(?:trainstack\b(?!\[)|'trainstack\[[\w,]+\]')", line)
    ]
    assert wrong == []


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_readme_begins_with_picture_installation_and_code() -> None:
    order = [
        TEXT.index(part) for part in (f"]({settings()[1]}images/{PICTURE.name})", "pip install trainstack", SCRIPT)
    ]
    assert order == sorted(order)
    assert TEXT.count("\n") <= 158
    assert "**wrong**" not in TEXT  # the comparison with other libraries is docs/conformance.md


def test_the_home_page_has_the_same_script_and_picture() -> None:
    home = ROOT / "docs" / "index.md"
    assert blocks_of(home)[0].source == SCRIPT
    assert f"](images/{PICTURE.name})" in home.read_text(encoding="utf-8")


def test_the_picture_shows_kill_and_resume_and_loads_nothing() -> None:
    picture = PICTURE.read_text(encoding="utf-8")
    shown = re.sub(r"&#160;|<[^>]*>", " ", picture)
    order = [shown.index(part) for part in ("$ python train.py", "Killed", "resumed", "5/5")]
    assert order == sorted(order)
    assert not re.search(r"url\(['\"]?http|href=|@import|@font-face", picture)
