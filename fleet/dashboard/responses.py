"""Responses of the dashboard, and what bounds the pages in them."""

from __future__ import annotations

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Of reports, which a run's ServerApp wrote: nothing in them runs."""


class TextPage(HTMLResponse):
    """A page, whatever characters it has: no text of a run keeps it away."""

    def render(self, content: object) -> bytes:
        """Encode the page."""
        return str(content).encode("utf-8", "replace")


class BoundingHeaders:
    """Adds headers that bound what a page may do; a page's own policy comes first."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                added = [
                    (b"content-security-policy", POLICY.encode()),
                    (b"x-content-type-options", b"nosniff"),
                    (b"referrer-policy", b"same-origin"),
                    (b"cache-control", b"no-store"),
                ]
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in added if pair[0] not in names),
                ]
            await send(message)

        await self._app(scope, receive, with_headers)
