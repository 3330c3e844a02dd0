"""A real Chromium without a window, driven over a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.helpers.patience import patience

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
"""The browser on this machine; None if there is none."""

_LONGEST_S = patience(20)
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # which root may not have, and pages of our own do not need
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Browser:
    """One page of a browser; `events` are the messages that it sent without a request: (method, parameters)."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in), os.close(theirs_out)
        self._buffer, self._numbers, self._session = b"", itertools.count(1), None
        self.events: list[tuple[str, dict[str, Any]]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and wait for its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is there; forgets earlier events."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self._receive()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write the visible part, or the whole page, as a PNG."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        os.close(self._out), os.close(self._in)
        self._process.terminate()
        self._process.wait(_LONGEST_S)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _LONGEST_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message.get("params", {})))
        return message
