"""The health of a federation's server: SuperLink, disks, certificates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flwr_distill.fleet.authority import CertificateError
from flwr_distill.fleet.certificates import CertificateFolder, Issued
from flwr_distill.server.page.words import data_size

LOW_SHARE = 0.05
LOW_BYTES = 2**30
"""Free space of a disk under which it is nearly full; either counts."""
SOON = 10
"""Days before its end from which a certificate is said to expire."""


@dataclass(frozen=True)
class Check:
    """Something that was checked, what was found, and whether that is as it should be."""

    what: str
    found: str
    fine: bool = True


def checks(
    superlink: str,
    problem: str,
    answer_seconds: float,
    folders: Iterable[Path],
    issued: Iterable[Issued],
) -> list[Check]:
    """All checks: SuperLink (its address and why it does not answer), load, disks, certificates."""
    answer = problem or f"answers in {1000 * answer_seconds:.0f} ms"
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return [
        Check(f"SuperLink {superlink}", answer, not problem),
        Check("Load of this machine", f"{load:.1f} on {cores} cores"),
        *_disks(folders),
        *_certificates(issued),
    ]


def read_certificates(folder: Path | None) -> list[Issued]:
    """Valid certificates of an authority's folder; none without one."""
    if folder is None or not folder.is_dir():
        return []
    try:
        return [each for each in CertificateFolder(folder).issued() if not each.revoked]
    except CertificateError:
        return []


def _disks(folders: Iterable[Path]) -> list[Check]:
    found: dict[int, Check] = {}
    for folder in folders:
        try:
            device, usage = folder.stat().st_dev, shutil.disk_usage(folder)
        except OSError as error:
            found[-len(found) - 1] = Check(f"Disk of {folder}", error.strerror or str(error), False)
            continue
        fine = usage.free > max(LOW_SHARE * usage.total, LOW_BYTES)
        text = f"{data_size(usage.free)} of {data_size(usage.total)} free"
        found.setdefault(device, Check(f"Disk of {folder}", text, fine))
    return list(found.values())


def _certificates(issued: Iterable[Issued]) -> list[Check]:
    """One check of all, and one of each that expires soon."""
    valid = list(issued)
    soon = [each for each in valid if each.days_left < SOON]
    if not valid:
        return []
    if not soon:
        first = min(valid, key=lambda each: each.days_left)
        return [Check("Certificates", f"the first, of {first.name}, expires on {first.expires}")]
    return [_expiring(each) for each in soon]


def _expiring(issued: Issued) -> Check:
    expires = "expired" if issued.days_left < 0 else "expires"
    found = f"{expires} on {issued.expires}: `flwr-distill certs renew {issued.name}`"
    return Check(f"Certificate of {issued.name}", found, fine=False)
