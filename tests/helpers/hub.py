"""A local server with the part of the Hub's API that an upload needs; it keeps the requests."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub:
    """Attributes: requests for repositories, files by name, commits, tokens of requests."""

    def __init__(self) -> None:
        self.url = ""
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.refuses = False

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and the JSON of the answer."""
        if self.refuses:
            return 403, {"error": "no"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = any(repo["name"] == asked["name"] for repo in self.made)
            self.made.append(asked)
            return (409 if known else 200), {"url": f"{self.url}/{name}", "name": name, "id": name}
        if "/preupload/" in path:
            return 200, {"files": [self._mode(file) for file in json.loads(body)["files"]]}
        if "/commit/" in path:
            return 200, self._commit(path, body)
        return 200, {"id": "me/line", "sha": "0" * 40, "siblings": [], "private": False, "tags": [], "author": "me"}

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        return {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}

    def _commit(self, path: str, body: bytes) -> dict[str, Any]:
        lines = [json.loads(line) for line in body.decode().splitlines()]
        self.commits.append({"revision": path.rpartition("/")[2], **lines[0]["value"]})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
        repo = re.sub(r"^/api/models/|/commit/.*$", "", path)
        return {"success": True, "commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A block in which the server runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self._body()
            hub.tokens.add(self.headers.get("Authorization"))
            status, answer = hub.answer(self.path.partition("?")[0], body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        do_GET = do_POST = do_HEAD = handle_one

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
