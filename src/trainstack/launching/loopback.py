"""A rendezvous of torch's agent on one host, whose stores listen only on the loopback address."""

from __future__ import annotations

from typing import Any

from trainstack._store import LOOPBACK, listen_on_loopback

NAME = "trainstack-loopback"


def register_loopback_rendezvous() -> str:
    """Register the rendezvous with torch's agent. Returns its name for `rdzv_backend`.

    torch 2.13.0: the stores of its backend `c10d` listen on all interfaces, for every endpoint.
    """
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(NAME, _create)
    return NAME


def _create(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    class Backend(C10dRendezvousBackend):
        name = NAME  # torch compares it with the requested backend

    store = _loopback_store()
    handler = create_handler(store, Backend(store, parameters.run_id), parameters)
    # torch 2.13.0: the private method that opens the store of the workers
    handler._create_tcp_store_server = lambda master_addr, master_port: _loopback_store()  # type: ignore[method-assign]
    return handler


def _loopback_store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = listen_on_loopback(0)
    assert listener is not None
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach())
