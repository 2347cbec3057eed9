"""Forks the processes of a federation on this machine from one that has done their imports.

The imports of a node's four processes take over ten seconds of a core, most of it for PyTorch, and
memory that forks share. A local federation starts three nurseries: for workers, for the rest of a
node (without PyTorch: sooner ready), and for ServerApps; a node by itself one for its parts,
without PyTorch; a simulation one for its workers. `node.processes.start_bound` sends them requests
over sockets. A nursery has one thread, and forks before anything opens a channel, a thread pool or
a GPU.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import site
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from flwr_distill.node.kernel import die_with, name_process

NURSERY = "FLWR_DISTILL_NURSERY"
"""Environment variable with the folder of the nurseries' sockets."""

NODE = "flwr_distill.node.main"
SUPERNODE, EXECUTOR = "flwr_distill.flower.supernode", "flwr_distill.flower.executor"
WORKER = "flwr_distill.flower.worker"
MAILBOX = "flwr_distill.node.mailbox"
SERVER_APP = "flwr_distill.fleet.serverapp"
VIRTUAL_WORKER = "flwr_distill.simulation.worker"
NODES, WORKERS, PARTS, SERVER_APPS = "nodes", "workers", "parts", "serverapps"
SIMULATION = "simulation"
NURSERIES = {
    NODES: (NODE, SUPERNODE, EXECUTOR),
    WORKERS: (WORKER,),
    PARTS: (SUPERNODE, EXECUTOR, WORKER),
    SERVER_APPS: (SERVER_APP,),
    SIMULATION: (VIRTUAL_WORKER,),
}
"""Names of sockets, and the modules that are run there, by their function `main`."""
_FOR_ALL_PARTS = (
    *(EXECUTOR, WORKER, "flwr_distill.flower.preload"),
    *("pydantic.main", "pydantic.types", "PIL.Image"),
    *("cryptography.x509.verification", "cryptography.hazmat.primitives.serialization.ssh"),
)
"""What `PARTS` imports: libraries, and of our packages those alone that a worker imports."""

_MAX_REQUEST = 1 << 20
_FORK_TIMEOUT = 600.0
"""Seconds for a nursery to fork: the first worker waits until PyTorch is imported."""


def can_fork() -> bool:
    """Whether forks of a process with PyTorch are safe here: for libraries, and GPU drivers."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


class ForkedProcess:
    """A process that a nursery has forked, as a `subprocess.Popen`; it ends with this object."""

    def __init__(self, pid: int, nursery: socket.socket) -> None:
        self.pid = pid
        self._nursery = nursery
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs, as far as was polled."""
        return self._code

    def poll(self) -> int | None:
        """Return the exit code if the process has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; return its exit code."""
        if self._code is None:
            self._nursery.settimeout(timeout)
            try:
                answer = self._nursery.recv(_MAX_REQUEST)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
            except OSError:
                answer = b""
            # A nursery that dies takes its children with it.
            self._code = json.loads(answer)["code"] if answer else -signal.SIGTERM
            self._nursery.close()
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def fork(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], outputs: Sequence[int]
) -> ForkedProcess | None:
    """Have a nursery that `env` names fork ``python -P -m MODULE ARGUMENTS``; None if none does.

    `outputs` are file descriptors for standard output and error.
    """
    if NURSERY not in env or tuple(command[:3]) != (sys.executable, "-P", "-m"):
        return None
    folder = Path(env[NURSERY])
    names = [name for name, modules in NURSERIES.items() if command[3] in modules]
    sockets = [path for name in names if (path := folder / name).exists()]
    if not sockets:
        return None
    # here: what a nursery imports, apps cannot bring
    from flwr_distill.protocol.socket_path import short_path

    nursery = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery.settimeout(_FORK_TIMEOUT)
    request = {"command": list(command[3:]), "env": dict(env), "fds": list(pass_fds)}
    try:
        with short_path(sockets[0]) as address:
            nursery.connect(address)
        socket.send_fds(nursery, [json.dumps(request).encode()], [*outputs, *pass_fds])
        answer = nursery.recv(_MAX_REQUEST)
    except OSError:
        answer = b""
    if not answer:
        nursery.close()
        return None
    return ForkedProcess(json.loads(answer)["pid"], nursery)


class Nursery:
    """Forks a process for each connection, and sends its exit code; a requester's end ends it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, socket.socket] = {}
        self._spare = os.open(os.devnull, os.O_RDONLY)

    def serve(self) -> NoReturn:
        """Fork until this process is ended."""
        self._wake_on_child()
        for each in (self._listener, self._woken):
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._report_the_dead()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:
                    self._receive(key.fileobj)  # it may have been closed a moment ago

    def _wake_on_child(self) -> None:
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno != errno.EMFILE:  # of the whole system, say: it asks again
                time.sleep(0.1)
                return
            os.close(self._spare)  # hang up, as the connection would wait here for ever
            self._listener.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
        else:
            self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, connection: socket.socket) -> None:
        try:
            message, fds, flags, _ = socket.recv_fds(connection, _MAX_REQUEST, 16)
        except OSError:
            message, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:  # too many open files: some are not here
            message = b""
        if not message:
            for fd in fds:
                os.close(fd)
            for pid in [pid for pid, owner in self._children.items() if owner is connection]:
                del self._children[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            self._hang_up(connection)
            return
        request = json.loads(message)
        parent = os.getpid()
        child: int | None = None
        try:
            child = os.fork()
        except OSError as error:  # of processes or memory: the requester starts a program
            print(f"nursery: no fork: {error}", file=sys.stderr, flush=True)
        if child == 0:
            self._become(request, fds, parent)
        for fd in fds:
            os.close(fd)
        if child is None:
            self._hang_up(connection)
            return
        with suppress(OSError):
            os.setpgid(child, child)  # here and in the child, as either may come first
        self._children[child] = connection
        with suppress(OSError):
            connection.send(json.dumps({"pid": child}).encode())

    def _hang_up(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()

    def _report_the_dead(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if connection := self._children.pop(pid, None):
                with suppress(OSError):
                    code = os.waitstatus_to_exitcode(status)
                    connection.send(json.dumps({"code": code}).encode())
                self._hang_up(connection)

    def _become(self, request: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            die_with(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for key in list(self._selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
            self._wake.close()
            self._selector.close()
            _place(fds, [1, 2, *request["fds"]])
            os.environ.update(request["env"])
            module, *arguments = request["command"]
            sys.argv = [module, *arguments]
            name_process(module.partition(".")[2])
            if numpy_random := sys.modules.get("numpy.random"):
                numpy_random.seed()  # Python's own generator does so: forks would draw the same
            importlib.invalidate_caches()
            site.addsitepackages(None)  # packages installed since the nursery started
            importlib.import_module(module).main()
            code = 0
        except SystemExit as ending:
            if isinstance(ending.code, str):
                print(ending.code, file=sys.stderr)
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _place(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give file descriptors these numbers, which others may have, and close the old ones."""
    above = max(numbers) + 1
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=number <= 2)
        os.close(copy)


def _import(modules: Sequence[str]) -> None:
    """Import modules; missing ones fail in the child."""
    for module in modules:
        with suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # the collector would write to all of these pages, in every process


def main() -> None:
    """Run a nursery; arguments: its name, its socket's file descriptor, more modules to import."""
    name, listener, *preload = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each child has a socket here
    own = _FOR_ALL_PARTS if name == PARTS else NURSERIES[name]
    _import([*own, *preload])
    Nursery(socket.socket(fileno=int(listener))).serve()


if __name__ == "__main__":
    main()
