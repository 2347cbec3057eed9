"""HTTP proxies on loopback: one that refuses all, one that connects."""

import base64
import contextlib
import socket
import threading
from dataclasses import dataclass, field

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


@dataclass
class Proxy:
    """Its URL, and the first line and headers of each request that it got."""

    url: str
    requests: list[str] = field(default_factory=list)

    @property
    def variables(self):
        """An environment that names it in each way, and exempts nothing."""
        names = [n for name in VARIABLES for n in (name, name.upper())]
        exempt = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
        return dict.fromkeys(names, self.url) | dict.fromkeys(exempt, "")


@contextlib.contextmanager
def proxy(*, connects_to="", password=""):
    """A proxy that refuses, or connects to `connects_to` whatever is asked for.

    With a `password`, ``user:password``, it asks for that first.
    """
    wanted = f"Basic {base64.b64encode(password.encode()).decode()}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = Proxy(f"http://127.0.0.1:{server.getsockname()[1]}")

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=[connection], daemon=True).start()

        def answer(connection):
            with connection, contextlib.suppress(OSError):
                request = b""
                while b"\r\n\r\n" not in request and (part := connection.recv(4096)):
                    request += part
                started.requests.append(request.decode())
                if password and wanted not in request.decode():
                    connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                    return
                if not connects_to:
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                    return
                host, _, port = connects_to.rpartition(":")
                with socket.create_connection((host, int(port))) as target:
                    if request.startswith(b"CONNECT"):
                        connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    else:
                        target.sendall(request)
                    back = threading.Thread(target=copy, args=[target, connection], daemon=True)
                    back.start()
                    copy(connection, target)
                    back.join(5)

        threading.Thread(target=serve, daemon=True).start()
        yield started
        server.shutdown(socket.SHUT_RDWR)


def copy(source, target):
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)


class Wire:
    """A link to a server on loopback that a test cuts, heals, or breaks in the midst of a message.

    While it is cut, nothing that is sent arrives, and no connection ends: as with a pulled cable.
    Bytes that went either way are counted.
    """

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._whole = threading.Event()
        self._whole.set()
        self._left = None
        self._open = set()
        self.to_server = self.to_node = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self):
        self._whole.clear()

    def heal(self):
        self._whole.set()

    def break_all(self):
        """End all connections; new ones are accepted at once."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def break_after(self, num_bytes):
        """End the connection that sends so many more bytes to the server, once."""
        self._left = num_bytes

    def close(self):
        self.heal()
        self._server.close()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._connect, args=[connection], daemon=True).start()

    def _connect(self, node):
        self._whole.wait()
        self._open.add(node)
        with node, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            back = threading.Thread(target=self._copy, args=[server, node, False], daemon=True)
            back.start()
            self._copy(node, server, True)
            back.join(5)
        self._open.discard(node)

    def _copy(self, source, target, to_server):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                self._whole.wait()
                if to_server and self._left is not None:
                    if self._left < len(part):
                        target.sendall(part[: self._left])
                        self._left = None
                        break
                    self._left -= len(part)
                target.sendall(part)
                if to_server:
                    self.to_server += len(part)
                else:
                    self.to_node += len(part)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
