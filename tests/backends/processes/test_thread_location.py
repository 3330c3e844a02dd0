"""The place of a thread in the code of the user, as reported to other processes."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import trainstack
from tests.helpers.patience import patience
from trainstack.backends.processes import watchdog


def test_a_thread_is_found_in_the_users_code() -> None:
    over, inside = threading.Event(), threading.Event()

    def waits_for_data() -> None:
        inside.set()
        over.wait(20)  # a comment, which the place omits

    thread = threading.Thread(target=waits_for_data)
    thread.start()
    inside.wait(20)
    deadline = time.monotonic() + patience(20)
    while not (place := watchdog.summarize_thread(thread.ident or 0)).endswith(": over.wait(20)"):
        assert time.monotonic() < deadline, place
    over.set()
    thread.join()

    assert re.fullmatch(r"waits_for_data, at \S+test_thread_location\.py:\d+: over\.wait\(20\)", place)


def test_an_ended_thread_has_no_place() -> None:
    assert watchdog.summarize_thread(12345) == ""


def test_a_running_thread_can_be_summarized_at_any_moment() -> None:
    """An earlier version walked the frames in Python, and sometimes crashed the process."""
    over, places = threading.Event(), set[str]()

    def descends(depth: int) -> int:
        return sum(descends(depth - 1) for _ in range(2)) if depth else 1

    def runs() -> None:
        while not over.is_set():
            descends(6)

    thread = threading.Thread(target=runs)
    thread.start()
    for _ in range(500):
        places.add(watchdog.summarize_thread(thread.ident or 0).partition(",")[0])
    over.set()
    thread.join()

    assert {place.split(" > ")[0] for place in places - {""}} == {"runs"}


def test_a_place_begins_at_the_first_function_of_the_library() -> None:
    library: dict[str, Any] = {}
    file = str(Path(trainstack.__file__).parent / "trainer" / "trainer.py")
    exec(compile("def train(step):\n    step()", file, "exec"), library)

    def fails() -> None:
        raise ValueError

    try:
        library["train"](fails)
    except ValueError as error:
        place = watchdog.summarize_traceback(error.__traceback__)

    assert place.startswith("train > fails, at ")
