"""A federation's own certificate authorities, as a folder of PEM files.

::

    ca.crt  ca.key               the authority for SuperLink and users; its key stays here
    nodes-ca.crt  nodes-ca.key   the authority for nodes; its key stays here
    ca.crl  nodes-ca.crl         what is revoked: for the gate, for nodes
    issued.json                  everything they ever issued, with revocations
    server/                      ca.crt, server.crt, server.key: for the SuperLink's machine
    NODE/                        ca.crt, nodes-ca.crt, node.crt, login.pub: for that node's machine
    USER/                        ca.crt, user.crt, user.key: for who submits runs

There are two authorities, because gRPC distinguishes a node from a SuperLink in no other way: a
node's mailbox is a TLS server too. Nodes and users trust only ``ca.crt`` for the SuperLink, so a
node's certificate cannot pose as it, whichever hosts it names.

A node makes its keys on its own machine, and requests a certificate with `fleet.node_request`.
Keys that the authority makes, as for a federation on one machine, are in the folder.

A node has two keys: ``login.key`` for the SuperLink, and ``node.key`` for other nodes. Apps sign
with the second, so a sandbox can read it; nothing in a sandbox may log in as the node.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from flwr_distill.base.files import replacing, try_lock
from flwr_distill.fleet import authority
from flwr_distill.fleet.authority import (
    NODE_USES,
    SERVER_USES,
    USER_USES,
    Authority,
    CertificateError,
    check_new,
    new_key,
    open_ssh,
    private_pem,
    shared_hosts,
    subject_of,
    write_new,
)
from flwr_distill.fleet.node_request import SERVER, check_name, read_request

Role = Literal["viewer", "submitter", "operator"]
"""What a user may do, by docker/gate/nginx.conf."""

LOCK_TIMEOUT = 10.0
"""Seconds for other commands to unlock the folder; each takes milliseconds."""

_Key = ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey
_PKCS8, _OPEN_SSH_PRIVATE = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH


@dataclass(frozen=True)
class Issued:
    """An issued certificate: serial number in hexadecimal, dates in UTC, keys as for OpenSSH.

    Only users have a role, and only nodes a login key.
    """

    name: str
    hosts: list[str]
    serial: str
    expires: str
    public_key: str
    revoked: str | None = None
    role: str = ""
    login_key: str = ""

    @property
    def is_node(self) -> bool:
        """Whether it is a node's."""
        return self.name != SERVER and not self.role

    @property
    def file(self) -> str:
        """Name of its file."""
        return "server.crt" if self.name == SERVER else "user.crt" if self.role else "node.crt"

    @property
    def days_left(self) -> int:
        """Days until the day on which it expires."""
        return (datetime.date.fromisoformat(self.expires) - authority.now().date()).days

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key, as OpenSSH writes it."""
        return authority.fingerprint(self.public_key)


class CertificateFolder:
    """The authorities and the certificates they issued; :meth:`create` makes the folder.

    Its methods raise `CertificateError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._register = path / "issued.json"
        self._servers = Authority(path / "ca")
        self._nodes = Authority(path / "nodes-ca")

    @property
    def certificate(self) -> Path:
        """Certificate of the authority for SuperLink and users."""
        return self._servers.certificate

    @property
    def revocations(self) -> Path:
        """Revocation list of the authority for SuperLink and users, for the gate."""
        return self._servers.revocations

    @property
    def nodes_revocations(self) -> Path:
        """Revocation list of the authority for nodes, for nodes."""
        return self._nodes.revocations

    @property
    def noted_ids(self) -> dict[str, int]:
        """Flower's ids of registered nodes, by key, as `note_ids` wrote them."""
        if not self._noted.exists():
            return {}
        try:
            keys = json.loads(self._noted.read_text(encoding="utf-8"))
            return {str(key): int(node_id) for node_id, key in keys.items()}
        except (ValueError, AttributeError) as error:
            raise CertificateError(f"{self._noted} is unreadable: remove it") from error

    def note_ids(self, ids: Mapping[str, int]) -> None:
        """Add Flower's ids of registered nodes, by key, to those noted; revoked nodes leave.

        The file has the keys by id.
        """
        with self._locked():
            valid = {each.login_key for each in self.issued() if not each.revoked}
            noted = {**self.noted_ids, **ids}
            keys = {node_id: key for key, node_id in noted.items() if key in valid}
            with replacing(self._noted) as partial:
                partial.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")

    @property
    def _noted(self) -> Path:
        return self._path / "nodes.json"

    def create(self, days: int) -> None:
        """Make authorities that are valid for `days`."""
        write_new(
            {
                **self._servers.make("flwr-distill authority", days),
                **self._nodes.make("flwr-distill authority for nodes", days),
                self._register: b"[]\n",
            }
        )
        self._write_revocations([])

    def issue_server(self, hosts: Sequence[str], days: int) -> Issued:
        """Issue the SuperLink's certificate for every DNS name and address that reaches it."""
        key = new_key()
        return self._issue(_draft(SERVER, hosts, key), days, {"server.key": _pem(key)})

    def issue_node(self, name: str, hosts: Sequence[str], days: int) -> Issued:
        """Issue a node's keys and certificate; other nodes reach it at `hosts`, else at `name`."""
        check_name(name)
        key, login = new_key(), new_key()
        files = {"node.key": _pem(key), "login.key": private_pem(login, _OPEN_SSH_PRIVATE)}
        draft = _draft(name, hosts or [name], key, login_key=open_ssh(login.public_key()))
        return self._issue(draft, days, files)

    def issue_user(self, name: str, role: Role, days: int) -> Issued:
        """Issue a user's key and certificate, which has the role."""
        check_name(name)
        key = new_key()
        return self._issue(_draft(name, [], key, role=role), days, {"user.key": _pem(key)})

    def sign(
        self,
        request: bytes,
        days: int,
        hosts: Sequence[str] = (),
        fingerprint: str | None = None,
    ) -> Issued:
        """Issue a certificate for a node's request (PEM), of `fleet.node_request.request_node`.

        Only name and keys are taken from the request. Other nodes reach it at `hosts`, else at its
        name; a request with another host is refused. A `fingerprint` must be the key's.
        """
        node = read_request(request)
        draft = _draft(node.name, hosts or [node.name], node.key, login_key=node.login_key)
        actual = draft.fingerprint
        if fingerprint is not None and fingerprint != actual:
            raise CertificateError(
                f"the request's key has {actual}", where="fingerprint", value=fingerprint
            )
        if unnamed := [host for host in node.hosts if host not in draft.hosts]:
            options = " ".join(f"--host {host}" for host in unnamed)
            raise CertificateError(
                f"names {', '.join(unnamed)}",
                where=f"the request of {node.name}",
                remedy=f"give {options} if you know that this is the node's own, else have it make "
                "a request without",
            )
        return self._issue(draft, days, {})

    def renew(self, name: str, days: int) -> Issued:
        """Issue a new certificate for the same key and hosts, in place of the last one."""
        with self._locked():
            last = self.valid(name)
            if last is None:
                raise CertificateError(
                    f"has issued no {name}, or it is revoked",
                    where=self._path,
                    remedy="`flwr-distill certs list` shows what it has issued",
                )
            entry, files = self._signed(last, days)
            self._save([*self.issued(), entry])  # first: only what it lists can be revoked
            for file, content in files.items():
                with replacing(self._path / name / file) as partial:
                    partial.write_bytes(content)
        return entry

    def issued(self) -> list[Issued]:
        """Return all certificates that were issued, in order."""
        try:
            return [Issued(**fields) for fields in json.loads(self._register.read_text())]
        except FileNotFoundError:
            raise CertificateError(
                "has no authority", where=self._path, remedy="make one: `flwr-distill certs init`"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(
                f"cannot be read: {error}",
                where=self._register,
                remedy="restore it from a copy, or use the version that wrote it",
            ) from error

    def valid(self, name: str) -> Issued | None:
        """Return the last certificate with this name that is not revoked, if there is one."""
        valid = [each for each in self.issued() if each.name == name and each.revoked is None]
        return valid[-1] if valid else None

    def mark_revoked(self, name: str) -> None:
        """Record that all certificates with this name are revoked, and write the lists."""
        today = authority.now().date().isoformat()
        with self._locked():
            issued = [
                replace(each, revoked=today) if each.name == name and each.revoked is None else each
                for each in self.issued()
            ]
            self._write_revocations(issued)  # first: who repeats the command finds it not revoked
            self._save(issued)

    def _write_revocations(self, issued: Sequence[Issued]) -> None:
        """Write the revocation lists; each has all that is revoked, of both authorities."""
        revoked = {
            int(each.serial, 16): datetime.datetime.fromisoformat(each.revoked)
            for each in issued
            if each.revoked is not None
        }
        for each in (self._servers, self._nodes):
            each.write_revocations(revoked)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder: of two commands at once, each would lose what the other has written."""
        self.issued()  # there is an authority
        folder, deadline = os.open(self._path, os.O_RDONLY), time.monotonic() + LOCK_TIMEOUT
        try:
            while not try_lock(folder, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise CertificateError(
                        "another command has locked it",
                        where=self._path,
                        remedy="wait for that `flwr-distill certs`, or end it",
                    )
                time.sleep(random.uniform(0.01, 0.05))
            yield
        finally:
            os.close(folder)

    def _authority_of(self, name: str, role: str) -> Authority:
        return self._servers if name == SERVER or role else self._nodes

    def _issue(self, draft: Issued, days: int, files: dict[str, bytes]) -> Issued:
        name = draft.name
        with self._locked():
            if self.valid(name):
                raise CertificateError(
                    f"is issued already, in {self._path / name}",
                    where=name,
                    remedy=f"`flwr-distill certs renew {name}` renews it; for another key, "
                    f"`flwr-distill certs revoke {name}` first",
                )
            entry, signed = self._signed(draft, days)
            files = {**files, "ca.crt": self.certificate.read_bytes(), **signed}
            if entry.is_node:
                files["login.pub"] = f"{entry.login_key} {name}\n".encode()
            certificate = {self._path / name / entry.file: files.pop(entry.file)}
            check_new(certificate)
            write_new({self._path / name / file: content for file, content in files.items()})
            self._save([*self.issued(), entry])  # before the certificate, as in `renew`
            write_new(certificate)
        return entry

    def _signed(self, draft: Issued, days: int) -> tuple[Issued, dict[str, bytes]]:
        """Return the entry of a new certificate, and its files."""
        signer = self._authority_of(draft.name, draft.role)
        self._check_hosts(draft.name, draft.hosts)
        uses = SERVER_USES if draft.name == SERVER else USER_USES if draft.role else NODE_USES
        key = serialization.load_ssh_public_key(draft.public_key.encode())
        assert isinstance(key, ec.EllipticCurvePublicKey)
        subject = subject_of(draft.name, draft.role)
        certificate = signer.sign(subject, key, draft.hosts, uses, days)
        entry = replace(
            draft,
            serial=f"{certificate.serial_number:x}",
            expires=certificate.not_valid_after_utc.date().isoformat(),
        )
        files = {entry.file: certificate.public_bytes(serialization.Encoding.PEM)}
        if entry.is_node:
            files[signer.certificate.name] = signer.certificate.read_bytes()
        return entry, files

    def _check_hosts(self, name: str, hosts: Sequence[str]) -> None:
        """Check that the SuperLink and a node will have no host in common.

        Revoked certificates count until they expire, since TLS of gRPC reads no revocation list.
        """
        for each in self.issued():
            between = SERVER in (name, each.name) and name != each.name
            if between and each.days_left >= 0 and (shared := shared_hosts(hosts, each.hosts)):
                raise CertificateError(
                    f"is {each.name}'s until {each.expires}",
                    where="host",
                    value=shared[0],
                    remedy="the SuperLink and nodes have no host in common: give another",
                )

    def _save(self, issued: Sequence[Issued]) -> None:
        with replacing(self._register) as partial:
            partial.write_text(json.dumps([asdict(entry) for entry in issued], indent=2) + "\n")


def _draft(name: str, hosts: Sequence[str], key: _Key, **more: str) -> Issued:
    """The entry of a certificate that is not yet signed."""
    public = key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key
    return Issued(name, list(hosts), "", "", open_ssh(public), **more)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return private_pem(key, _PKCS8)
