"""The tests that are likely to detect a change.

Tracing the whole suite takes longer than the measurement itself. So test files are ranked by names and imports for each
change. Three cases of each test of the best files are run first. If they pass, the best files are traced once, and
their tests that run a changed line are selected. The lines of each traced file are kept in build/mutants/lines, under
the hash of its text.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.mutants.changes import Change

ROUNDS = (1, 4)
"""Test files that run the statement, at least, by round: one detects most changes, and few need more than four."""
FIRST_FILES = 4
"""Test files of which a few cases of each test are run first. That takes less than a trace, and few files are likely
for several changes of a sample."""
MOST_FILES = 5
"""Further down the ranking, files share no more than a frequent name with the change."""
_ALL_LINES = (1, 10**9)
_LEFT_OUT = "helpers.costs"
"""Tests that compare CPU times fail at random next to other work."""
_FOLDERS_LEFT_OUT = ("tools", "examples")
"""Tests of the tools and of whole scripts: they take long, and no single promise is their topic."""

Trace = Callable[[str], list[dict[str, Any]]]


class Selection:
    """Ranks, traces and selects.

    Args:
        snapshot: the folder with the tests.
        cache: the folder of the traced lines.
        trace: runs a test file, and returns the records of its tests with "lines".
    """

    def __init__(self, snapshot: Path, cache: Path, trace: Trace) -> None:
        self._snapshot, self._cache, self._trace = snapshot, cache, trace
        texts = {path.relative_to(snapshot).as_posix(): path.read_text() for path in snapshot.glob("tests/**/*.py")}
        self._texts = {path: text for path, text in texts.items() if Path(path).name.startswith("test_")}
        self._texts = {
            path: text
            for path, text in self._texts.items()
            if _LEFT_OUT not in text and Path(path).parts[1] not in _FOLDERS_LEFT_OUT
        }
        helpers = {path[:-3].replace("/", "."): text for path, text in texts.items() if path not in self._texts}
        self._words = {path: _words(text, helpers) for path, text in self._texts.items()}
        self._frequency = Counter(word for words in self._words.values() for word in words)
        self._traced: dict[str, list[dict[str, Any]]] = {}
        for path in self._texts:
            self._load(path)

    def likeliest(self, change: Change) -> list[str]:
        """The test files that are run before any is traced."""
        return self.ranking(change)[:FIRST_FILES]

    def rounds(self, change: Change, seconds: float) -> Iterator[list[dict[str, Any]]]:
        """Records of tests that run the changed statement, in an order that finds failures early.

        Most changes are detected in the first round, and later ones trace more files. No test is in two rounds.

        Args:
            seconds: what the tests of a round take together, at most; the first one may take more.
        """
        ranking, given = self.ranking(change), set[str]()
        for wanted in ROUNDS:
            for position, path in enumerate(ranking[:MOST_FILES]):
                # Files that were traced for other changes do not count here: each training runs many statements.
                if len(_by_file(self._covering(change)).keys() & ranking[:position]) >= wanted:
                    break
                if path not in self._traced and not self._load(path):  # another job may have traced it
                    self._traced[path] = self._trace(path)
                    self._store(path)
            # Python runs no line for a default of a decorated function, and for some parts of a statement.
            covering = self._covering(change) or self._running(change.path, change.scope or _ALL_LINES)
            left = [test for test in covering if test["test"] not in given]
            chosen = _in_turns(left, ranking, seconds)
            given |= {test["test"] for test in chosen}
            if chosen:
                yield chosen

    def ranking(self, change: Change) -> list[str]:
        """Test files, the likeliest first: by rare names of the change in their text, and by equal folders."""
        module = change.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        names = {part.strip("_") for part in change.place.split(".")} - {"", "<module>", "init", "call", "lambda"}
        weights = {module: 8.0, **dict.fromkeys(names, 4.0), **dict.fromkeys(_stem_words(change.path), 1.0)}
        folders = Path(change.path).parts[2:-1]

        def score(path: str) -> float:
            common = sum(a == b for a, b in zip(folders, Path(path).parts[1:], strict=False))
            stems = len(_stem_words(path) & _stem_words(change.path))
            rare = sum(
                weight / self._frequency[word] ** 0.5 for word, weight in weights.items() if word in self._words[path]
            )
            return rare + common + stems

        return sorted(self._texts, key=lambda path: (-score(path), path))

    def _covering(self, change: Change) -> list[dict[str, Any]]:
        """Tests that run the statement; outside functions, those that run a line of its file."""
        return self._running(change.path, change.lines if change.scope else _ALL_LINES)

    def _running(self, path: str, lines: tuple[int, int]) -> list[dict[str, Any]]:
        """Passing tests that run one of the lines."""
        path, wanted = path.removeprefix("src/"), range(lines[0], lines[1] + 1)
        traced = {test["test"] for tests in self._traced.values() for test in tests}
        seconds = dict[str, float]()
        for test in [test for tests in self._traced.values() for test in tests]:
            if test["outcome"] == "passed" and any(line in wanted for line in test["lines"].get(path, ())):
                for name in (test["test"], *(name for name in test["like"] if name not in traced)):
                    seconds[name] = test["seconds"]
        return [{"test": name, "seconds": taken} for name, taken in seconds.items()]

    def _load(self, path: str) -> bool:
        if not self._cached(path).is_file():
            return False
        self._traced[path] = json.loads(self._cached(path).read_text())
        return True

    def _store(self, path: str) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        temporary = self._cached(path).with_suffix(f".{threading.get_ident()}")
        temporary.write_text(json.dumps(self._traced[path]))
        temporary.replace(self._cached(path))

    def _cached(self, path: str) -> Path:
        digest = hashlib.sha256((path + self._texts[path]).encode()).hexdigest()[:24]
        return self._cache / f"{digest}.json"


def _words(text: str, helpers: Mapping[str, str]) -> set[str]:
    """Identifiers and imported modules of a test file and of the workers that it imports."""
    workers = re.findall(r"^from (tests\.helpers\.workers\.\w+) import", text, re.MULTILINE)
    for names in re.findall(r"^from tests\.helpers\.workers import (.+)$", text, re.MULTILINE):
        workers += [f"tests.helpers.workers.{name}" for name in re.findall(r"\w+", names)]
    text = "\n".join([text, *(helpers.get(worker, "") for worker in workers)])
    words = {word.strip("_") for word in re.findall(r"\w+", text)}
    for module, names in re.findall(r"^\s*from (trainstack[\w.]*) import ([^\n(]+|\([^)]*\))", text, re.MULTILINE):
        words |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return words | set(re.findall(r"\btrainstack(?:\.\w+)+", text))


def _stem_words(path: str) -> set[str]:
    return {word.rstrip("s") for word in Path(path).stem.removeprefix("test_").split("_") if len(word) > 3}


def _by_file(tests: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    files: dict[str, list[Mapping[str, Any]]] = {}
    for test in sorted(tests, key=lambda test: test["seconds"]):
        files.setdefault(test["test"].partition("::")[0], []).append(test)
    return files


def _in_turns(tests: Sequence[Mapping[str, Any]], ranking: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """The fastest test of each file, then the second fastest of each, and so on: neighbours often check the same."""
    files = _by_file(tests)
    order = [files[path] for path in ranking if path in files]
    chosen: list[dict[str, Any]] = []
    spent = 0.0
    for turn in range(max(map(len, order), default=0)):
        for each in order:
            if turn < len(each) and (not chosen or spent + each[turn]["seconds"] <= seconds):
                chosen.append(dict(each[turn]))
                spent += each[turn]["seconds"]
    return chosen
