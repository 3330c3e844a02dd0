"""A TCP proxy that can stop forwarding, like an interrupted network: connections stay open, and no data arrives."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Forward connections to a port of the loopback address.

    Attributes:
        port: to connect to.
        open: bytes are forwarded while it is set.
    """

    def __init__(self, target: int) -> None:
        self._target, self.open = target, threading.Event()
        self.open.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def check(self) -> None:
        """Raise OSError if no process listens at the target."""
        socket.create_connection(("127.0.0.1", self._target)).close()

    def close(self) -> None:
        """End all connections."""
        for end in [self._listener, *self._sockets]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.open.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
