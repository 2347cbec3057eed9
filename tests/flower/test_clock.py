"""A SuperLink's clock is compared with this machine's, also where it speaks HTTP."""

import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flwr_distill.flower import clock
from flwr_distill.node.stock import FLEET_OVER_HTTP


@pytest.fixture
def server(monkeypatch):
    """A server over HTTP, whose clock is ahead by the seconds in `ahead`."""

    class Handler(BaseHTTPRequestHandler):
        def date_time_string(self, timestamp=None):
            return self.server.says(time.time() + self.server.ahead)

    monkeypatch.setattr(clock, "installed_line", lambda: FLEET_OVER_HTTP)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.ahead, server.says = 0.0, lambda seconds: formatdate(seconds, usegmt=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def offset(server):
    address = f"127.0.0.1:{server.server_port}"
    return clock.clock_offset(address, insecure=True, root_certificates=None)


@pytest.mark.parametrize("ahead", [-4000.0, 0.0, 90.0])
def test_over_http_a_clock_is_known_to_a_second(server, ahead):
    server.ahead = ahead
    assert offset(server) == pytest.approx(ahead, abs=1.0)


def test_a_server_that_says_no_time_or_is_gone_is_an_error(server):
    server.says = lambda seconds: "noon"
    with pytest.raises(clock.ClockError, match="does not say"):
        offset(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(clock.ClockError):
        offset(server)
