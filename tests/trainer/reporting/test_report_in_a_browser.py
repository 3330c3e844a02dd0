"""The report in a real browser: its pixels, its document and its network requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainstack as ts
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.modules import Classifier, train

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"),
]

EVIL = "<img src=x onerror=document.title='broken'>"


class Named(Classifier):
    """The names of its layers and metrics are HTML that a page without escaping would run."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(validate=True, scheduler=True, **changes)
        self.add_module(EVIL.replace(".", " "), self.net)

    def on_end_train_step(self, global_step: int, loss: Any) -> None:
        self.log(f"<script>document.title='broken'</script>{EVIL}", global_step)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    saving = ts.DefaultCheckpointerArguments()
    train(Named(), folder, epochs=3, log_every=1, writers=["csv"], checkpointer_args=saving)
    return folder / "report.html"


def pixels(browser: Browser, folder: Path) -> np.ndarray[Any, Any]:
    image = pytest.importorskip("PIL.Image")
    browser.screenshot(folder / "page.png")
    return np.asarray(image.open(folder / "page.png").convert("RGB")).astype(int)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_curves_are_visible_in_light_and_in_dark(browser: Browser, page: Path, tmp_path: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.ask("document.querySelector('figure').scrollIntoView()")
    seen = pixels(browser, tmp_path)

    assert seen[0, 0].mean() < 60 if dark else seen[0, 0].mean() > 200
    for series in range(3):  # train/loss, train/loss_epoch and val/loss
        style = f"getComputedStyle(document.querySelectorAll('figure .curve')[{series}]).color"
        colour = [int(part) for part in browser.ask(style)[4:-1].split(",")]
        rows, columns = np.nonzero(np.abs(seen - colour).sum(-1) < 30)
        box = browser.ask("(b => [b.left, b.right])(document.querySelector('svg').getBoundingClientRect())")
        within = (columns > box[0]) & (columns < box[1])
        assert within.sum() > 150, f"curve {series} is not visible"
        assert np.ptp(columns[within]) > 200
        assert np.ptp(rows[within]) > 20


def test_the_page_makes_no_request_and_runs_one_script(browser: Browser, page: Path) -> None:
    browser.open(page)

    requests = [given["request"]["url"] for method, given in browser.events if method == "Network.requestWillBeSent"]
    assert requests == [page.resolve().as_uri()]
    complaints = [given for method, given in browser.events if method in ("Log.entryAdded", "Runtime.exceptionThrown")]
    assert complaints == []
    assert browser.ask("document.title") == "Named: run report"
    assert browser.ask("document.querySelectorAll('script').length") == 1
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert EVIL in browser.ask("document.body.innerText")


def test_an_injected_script_does_not_run(browser: Browser, page: Path, tmp_path: Path) -> None:
    """The content security policy protects text that was not escaped."""
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("</main>", "<script>document.title='broken'</script></main>"))
    browser.open(broken)
    assert browser.ask("document.title") == "Named: run report"


def test_the_pointer_shows_the_values_of_a_step(browser: Browser, page: Path) -> None:
    browser.open(page)
    box = browser.ask(
        "(b => [b.left, b.top, b.width, b.height])(document.querySelector('svg').getBoundingClientRect())"
    )
    legend = "[...document.querySelectorAll('figure')[0].querySelectorAll('.legend b')].map(b => b.textContent)"
    at_the_end = browser.ask(legend)
    first = browser.ask("JSON.parse(document.querySelector('.curve').dataset.values)[0]")

    browser.point_at(box[0] + 58 / 560 * box[2], box[1] + box[3] / 2)
    assert browser.ask("document.querySelector('figcaption').textContent") == "loss, at step 1"
    assert float(browser.ask(legend)[0]) == pytest.approx(first, rel=1e-3)
    browser.point_at(1, 1)
    assert browser.ask(legend) == at_the_end


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_fits_a_phone_and_a_desktop(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
