"""Serves the dashboard with uvicorn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from socket import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flwr_distill.fleet.dashboard.access import LOOPBACK, Access, AccessError, Tls
from flwr_distill.fleet.dashboard.app import MAX_STREAMS, Dashboard
from flwr_distill.fleet.dashboard.watch import Place
from flwr_distill.fleet.servers import why_not_free

CONNECTIONS = 4 * MAX_STREAMS
REQUEST = 10.0
"""Seconds in which a request must arrive, its body aside."""


class _Connection(H11Protocol):
    """Gives the application the caller's certificate, which TLS has verified.

    Callers without a role are cut off, and so are requests that take too long to arrive.
    """

    access: Access

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        certificate = transport.get_extra_info("peercert")
        self.app_state = {**self.app_state, "certificate": certificate}
        self._await_request()
        if self.access.tls and not self.access.role(certificate):
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._late.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._late.cancel()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._late = self.loop.call_later(REQUEST, self.transport.close)


def serve(
    place: Place,
    host: str,
    port: int,
    *,
    tls: Tls | None = None,
    plain: bool = False,
    allow_actions: bool = False,
    on_start: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve a place's dashboard until SIGTERM or Ctrl-C; `on_start` gets its address.

    Raises `AccessError` beyond loopback without `tls`, unless `plain` says that what admits users
    stands before it, and if the address cannot be used.
    """
    if host not in LOOPBACK and tls is None and not plain:
        raise AccessError(
            "anyone who reaches this address would see the federation",
            where="host",
            value=host,
            remedy="give --ssl-certfile, --ssl-keyfile, --ssl-ca-certfile and --ssl-crlfile; or "
            "--plain-http where nobody else reaches it",
        )
    if reason := why_not_free(f"{host}:{port}"):
        raise AccessError(reason, where="port", value=str(port), remedy="name another port")
    scheme, name = ("https" if tls else "http"), "localhost" if plain else host
    hosts = ["*"] if tls else [*LOOPBACK, host]
    access = Access(tls)
    dashboard = Dashboard(place, access, hosts, allow_actions=allow_actions)
    config = uvicorn.Config(
        dashboard.app,
        host=host,
        port=port,
        http=type("Connection", (_Connection,), {"access": access}),
        ws="none",
        log_level=logging.WARNING,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=1,
        server_header=False,
    )
    config.load()
    if tls:
        config.ssl = tls.context()
    server = _Server(config, lambda: on_start(f"{scheme}://{name}:{port}"))
    server.run()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()
