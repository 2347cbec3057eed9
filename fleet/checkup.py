"""Checks a machine before it becomes a node or a server: what is there, and what would fail."""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

from flwr_distill.fleet.gpu_speed import time_gpu
from flwr_distill.fleet.servers import listen_once
from flwr_distill.flower.clock import (
    MAX_AHEAD,
    MAX_BEHIND,
    ClockError,
    clock_offset,
)
from flwr_distill.flower.lines import why_unserved
from flwr_distill.links.credentials import is_signed
from flwr_distill.node.gpus import describe_gpu, oldest_driver, pytorch_needs, why_unusable
from flwr_distill.node.proxies import host_of, proxies_named, proxy_of, why_unused
from flwr_distill.node.reachability import check_superlink
from flwr_distill.node.settings import NodeError, NodeSettings
from flwr_distill.node.stock import is_another

DRIVER_FILE = Path("/proc/driver/nvidia/version")
SERVER_PORTS = {9091: "ServerAppIo API", 9092: "Fleet API", 9093: "Control API"}
PEER_PORT = 9200
MIN_SPACE = 2**30
"""Bytes that should be free for a node's state, and for what the server spools."""

ANSWER_TIMEOUT = 5.0
"""Seconds to wait for the SuperLink."""


@dataclass(frozen=True)
class Finding:
    """Result of a check, with a remedy unless it is ok; `numbers` by name, with their unit."""

    check: str
    state: Literal["ok", "failed", "unchecked"]
    found: str
    remedy: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


def checkup(settings: NodeSettings) -> Iterator[Finding]:
    """Check this machine for a node with these settings, one finding after the other.

    If they name no SuperLink, it is checked as a server too.
    """
    yield _software()
    yield _machine()
    yield _driver(settings.device)
    yield from _gpus(settings.device)
    yield from _spaces(settings)
    yield from _certificates(settings)
    if "superlink" in settings.model_fields_set:
        yield _peer_address(settings)
        yield _proxy(settings.superlink)
        yield (reached := _superlink(settings))
        yield _clock(settings, reached)
        yield _sender(settings)
    else:
        yield _proxy(None)
        yield from _server_ports()
        yield Finding("SuperLink", "unchecked", "not checked: name it with --superlink HOST:9092")


def _software() -> Finding:
    versions = {name: importlib.metadata.version(name) for name in ("flwr-distill", "flwr")}
    parts = [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in versions.items())]
    found = ", ".join([*parts, pytorch_needs()])
    if reason := why_unserved():
        return Finding("software", "failed", found, reason)
    return Finding("software", "ok", found)


def _machine() -> Finding:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"{platform.platform()}, {os.cpu_count()} cores, {memory:.1f} GiB of memory"
    return Finding("machine", "ok", found)


def _driver(device: str) -> Finding:
    oldest = oldest_driver()
    install = f"install NVIDIA's driver{'' if oldest is None else f' {oldest} or later'}"
    try:
        text = DRIVER_FILE.read_text(encoding="utf-8")
    except OSError:
        if torch.cuda.is_available():  # as under WSL
            return Finding("driver", "ok", "NVIDIA's driver works; its version is unreadable")
        if device.startswith("cuda"):
            remedy = f"{install}; a container needs NVIDIA's toolkit, and docker/gpu.yaml or --gpus"
            return Finding("driver", "failed", "no NVIDIA driver is loaded", remedy)
        return Finding("driver", "ok", "no NVIDIA driver is loaded: there is no GPU to use")
    version = re.search(r"\b(\d{3,})\.\d+(\.\d+)?\b", text)
    if version is None:
        return Finding("driver", "unchecked", text.partition("\n")[0])
    if oldest is not None and int(version[1]) < oldest:
        return Finding("driver", "failed", f"NVIDIA's driver {version[0]} is too old", install)
    return Finding("driver", "ok", f"NVIDIA's driver {version[0]}")


def _gpus(device: str) -> Iterator[Finding]:
    count = torch.cuda.device_count()
    number = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    if number >= count:
        yield Finding(
            "GPUs",
            "failed",
            f"device={device}, but this machine has {count} CUDA devices",
            f"see the driver above; or use device=auto or cpu ({pytorch_needs()})",
        )
    elif count == 0:
        yield Finding("GPUs", "ok", "none: nodes compute on the CPU")
    for number in range(count):
        yield _gpu(number)


def _gpu(number: int) -> Finding:
    check = f"cuda:{number}"
    if reason := why_unusable(number):
        remedy = "update the driver, install a PyTorch for this GPU, or use device=cpu"
        return Finding(check, "failed", reason, remedy)
    device = torch.device("cuda", number)
    try:
        timings = time_gpu(device)
        free, total = torch.cuda.mem_get_info(device)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        remedy = "nvidia-smi says who else uses it, and dmesg whether the hardware fails (Xid)"
        return Finding(check, "failed", f"{describe_gpu(number)}: {reason}", remedy)
    numbers = {f"{timing.name} (s)": timing.seconds for timing in timings}
    numbers |= {f"{t.name}, floor (s)": t.floor for t in timings if t.floor is not None}
    numbers |= {"free (bytes)": float(free), "memory (bytes)": float(total)}
    found = f"{describe_gpu(number)}, {free / 2**30:.1f} GiB free; {', '.join(map(str, timings))}"
    return Finding(check, "ok", found, numbers=numbers)


def _spaces(settings: NodeSettings) -> Iterator[Finding]:
    yield _space("state-dir", settings.state_dir, "--state-dir")
    yield _space("temporary", Path(tempfile.gettempdir()), "TMPDIR")


def _space(check: str, folder: Path, setting: str) -> Finding:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    numbers = {"free (bytes)": float(free)}
    if not os.access(there, os.W_OK | os.X_OK):
        remedy = f"let this user write there, or name another folder with {setting}"
        return Finding(check, "failed", f"{there} cannot be written to", remedy, numbers)
    found = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < MIN_SPACE:
        remedy = f"make room for 1 GiB, or name another folder with {setting}"
        return Finding(check, "failed", found, remedy, numbers)
    return Finding(check, "ok", found, numbers=numbers)


def _server_ports() -> Iterator[Finding]:
    for port, whose in {**SERVER_PORTS, PEER_PORT: "a node's peer-address"}.items():
        check = f"port {port}"
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            yield Finding(
                check,
                "failed",
                f"{whose}: {os.strerror(error.errno or 0)}",
                "end what listens there, or use another; if it is this federation itself, check it "
                "with --superlink HOST:9092",
            )
        else:
            yield Finding(check, "ok", f"{whose}: free")


def _peer_address(settings: NodeSettings) -> Finding:
    check = "peer-address"
    if (address := settings.peer_address) is None:
        return Finding(check, "ok", "none: nothing has to reach this node, the server relays to it")
    try:
        listen_once(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Finding(check, "unchecked", f"{address} is in use: by this node, if it runs")
        remedy = "give an address of this machine's own, or none: the server then relays"
        return Finding(check, "failed", f"{address}: nobody can listen there: {error}", remedy)
    found = f"{address} is free; whether other machines reach it cannot be checked from here"
    return Finding(check, "ok", found)


def _proxy(superlink: str | None) -> Finding:
    """Which proxy a SuperLink is called through."""
    check = "proxy"
    if not (named := proxies_named()):
        return Finding(check, "ok", "no variable names one")
    if superlink is None:
        found = f"{', '.join(named)}: not for this machine's own processes; for others: --superlink"
        return Finding(check, "ok", found)
    if proxy := proxy_of(superlink):
        found = f"{superlink} is called through {proxy} (no_proxy={host_of(superlink)} prevents it)"
        return Finding(check, "ok", found)
    return Finding(check, "ok", why_unused(superlink))


def _superlink(settings: NodeSettings) -> Finding:
    try:
        check_superlink(
            settings.superlink,
            insecure=settings.insecure,
            root_certificates=settings.root_certificates,
            timeout=ANSWER_TIMEOUT,
        )
    except NodeError as error:
        return Finding("SuperLink", "failed", str(error), "see Troubleshooting in docs/deploy.md")
    how = "without TLS" if settings.insecure else "its certificate is trusted and names the host"
    return Finding("SuperLink", "ok", f"{settings.superlink} answers, {how}")


def _clock(settings: NodeSettings, reached: Finding) -> Finding:
    if reached.state != "ok":
        return Finding("clock", "unchecked", "it is compared with the SuperLink's")
    try:
        offset = clock_offset(
            settings.superlink,
            insecure=settings.insecure,
            root_certificates=settings.root_certificates,
        )
    except ClockError as error:
        return Finding("clock", "failed", str(error), "set this machine's clock by NTP")
    numbers = {"SuperLink ahead (s)": offset}
    found = f"{abs(offset):.2f} s {'behind' if offset > 0 else 'ahead of'} the SuperLink's"
    if -MAX_AHEAD < offset < MAX_BEHIND:
        return Finding("clock", "ok", found, numbers=numbers)
    return Finding(
        "clock",
        "failed",
        f"{found}: Flower refuses nodes over {MAX_AHEAD} s ahead or {MAX_BEHIND} s behind",
        "set both clocks by NTP",
        numbers,
    )


def _sender(settings: NodeSettings) -> Finding:
    """Whether a reply in this node's name can only be its own."""
    check = "sender of replies"
    if is_another():
        found = "with this Flower no SuperLink compares who sends a reply, and none is signed"
        return Finding(check, "unchecked", found, "install flwr==1.32.1 (docs/flower.md)")
    if settings.insecure:
        found = "without TLS replies can be changed on the way, and any key can join"
        return Finding(check, "unchecked", found, "see Without Docker in docs/deploy.md")
    if settings.auth_key is None:
        found = "without auth-key this node makes a key up, and any other can join likewise"
        return Finding(check, "unchecked", found, "give --auth-key, and register its node.pub")
    found = (
        "flwr-distill superlink takes them from this node's key alone; flower-superlink does not "
        "compare it, so there let ServerApps know the nodes' keys (docs/flower.md)"
    )
    return Finding(check, "ok", found)


def _certificates(settings: NodeSettings) -> Iterator[Finding]:
    authorities: list[x509.Certificate] = []
    if settings.root_certificates is not None:
        authorities, finding = _dated("root-certificates", settings.root_certificates)
        yield finding
    if settings.peer_authority is not None:
        authorities, finding = _dated("peer-authority", settings.peer_authority)
        yield finding
    if settings.peer_certificate is not None and settings.peer_key is not None:
        yield _peer_certificate(settings, settings.peer_certificate, settings.peer_key, authorities)
    if settings.auth_key is not None:
        try:
            load_ssh_private_key(settings.auth_key.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            remedy = "give the login.key of `flwr-distill certs`"
            yield Finding("auth-key", "failed", f"{settings.auth_key}: {error}", remedy)
        else:
            found = "readable; whether the SuperLink knows it, the node says when it starts"
            yield Finding("auth-key", "ok", found)


def _dated(check: str, file: Path) -> tuple[list[x509.Certificate], Finding]:
    """Certificates of a PEM file, and whether all are valid today."""
    try:
        certificates = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        remedy = "give a PEM file, as `flwr-distill certs` writes them"
        return [], Finding(check, "failed", f"{file} cannot be read: {error}", remedy)
    now = datetime.datetime.now(datetime.UTC)
    for each in certificates:
        if now < each.not_valid_before_utc:
            found = f"{file} is valid from {each.not_valid_before_utc}, which is in the future"
            return certificates, Finding(check, "failed", found, "set this machine's clock by NTP")
        if now > each.not_valid_after_utc:
            found = f"{file} expired on {each.not_valid_after_utc.date()}"
            remedy = "issue another: see Keys in docs/deploy.md"
            return certificates, Finding(check, "failed", found, remedy)
    last = min(each.not_valid_after_utc for each in certificates).date()
    return certificates, Finding(check, "ok", f"valid until {last}")


def _peer_certificate(
    settings: NodeSettings, file: Path, key_file: Path, authorities: list[x509.Certificate]
) -> Finding:
    check = "peer-certificate"
    certificates, finding = _dated(check, file)
    if finding.state != "ok":
        return finding
    certificate = certificates[0]
    issue = "issue it with `flwr-distill certs node NAME --host HOST`, and copy all of its files"
    try:
        key = load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        return Finding(check, "failed", f"{key_file} cannot be read: {error}", issue)
    if key.public_key() != certificate.public_key():
        return Finding(check, "failed", f"{key_file} is not the key of {file}", issue)
    if not is_signed(certificate, authorities):
        by = settings.peer_authority or settings.root_certificates
        found = f"{file} is not signed by {by}"
        return Finding(check, "failed", found, issue)
    host = (settings.peer_address or "").rpartition(":")[0].strip("[]")
    if host and host not in (names := _names(certificate)):
        found = f"{file} names {', '.join(names) or 'no host'}, not peer-address's {host}"
        return Finding(check, "failed", found, issue)
    return finding


def _names(certificate: x509.Certificate) -> list[str]:
    """Host names and addresses that a certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in extension.value]
