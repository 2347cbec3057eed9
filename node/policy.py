"""A node's policy: what its owner lets runs ask of it, and send from it.

Anyone who may submit a run executes code on every node, so the policy is enforced outside the app
(`node.guard`). What it cannot enforce: `docs/policy.md`.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from flwr_distill.task.errors import SettingsError
from flwr_distill.task.settings import Block
from flwr_distill.task.text_files import EncodingError, read_text

ANY = "any"


def _unless_any(value: object) -> object:
    return None if value == ANY else value


_OrAny = BeforeValidator(_unless_any)
"""Of fields where None, ``any`` in a file, allows all."""
Name = Annotated[str, Field(min_length=1, max_length=200)]
BundleHash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]


def _is_ed25519(key: str) -> str:
    try:
        is_one = isinstance(load_ssh_public_key(key.encode()), Ed25519PublicKey)
    except (ValueError, UnsupportedAlgorithm):
        is_one = False
    if not is_one:
        raise ValueError("must be an ed25519 key as in OpenSSH's files: ssh-ed25519 AAAA...")
    return key


PublicKey = Annotated[str, AfterValidator(_is_ed25519)]


def _named(value: object) -> object:
    return str(value) if type(value) is int else value


ClassName = Annotated[str, BeforeValidator(_named), Field(pattern="^[^,]+$", max_length=200)]
"""A class folder's name, or a label."""
AbsolutePath = Annotated[str, Field(pattern="^/")]


_NOT_REAL = ("noise", "class-stats", "pixel-stats")
_OFF = (None, "any", "allowed", "none")
"""Values of fields in `_NEEDS` that need nothing."""
_DECLARED = ("replies", lambda replies: replies == "declared")
_NO_LINKS = ("direct_links", operator.not_)
_NEEDS: dict[str, list[tuple[str, Callable[[Any], bool], str]]] = {
    "settings": [
        (*_DECLARED, "replies: declared"),
        ("paths", lambda paths: paths == "named", "paths: named"),
    ],
    "most_epsilon": [
        ("least_noise", bool, "least-noise above 0: without noise, epsilon has no bound")
    ],
    "evaluation_epsilon": [
        (*_DECLARED, "replies: declared, else accuracy can leave in another record"),
        ("holdout", bool, "holdout, else a run chooses the samples (set it to 0.1)"),
    ],
    "counts_epsilon": [
        (*_DECLARED, "replies: declared, else counts can leave in another record"),
        ("holdout", bool, "holdout, else a run chooses the samples (set it to 0.1)"),
    ],
    "statistics_epsilon": [
        (*_DECLARED, "replies: declared, else counts can leave in another record")
    ],
    "single_updates": [(*_DECLARED, "replies: declared: the node must see what it sends")],
    "most_bytes_a_day": [(*_NO_LINKS, "direct-links: false: the node must see all bytes")],
    "sandbox": [(*_NO_LINKS, "direct-links: false, because a sandboxed app has no network")],
    "most_disk": [
        ("sandbox", lambda sandbox: sandbox != "none", "a sandbox, else the app writes anywhere")
    ],
}
"""What a field needs unless it is off: another field above it, its check, and the error."""


class Policy(Block):
    """What a node does and sends; the defaults keep samples, and virtual data made of real ones."""

    strategies: Annotated[list[Name] | None, _OrAny] = None
    """Strategies of runs that the node takes part in."""
    message_types: Annotated[list[Name] | None, _OrAny] = None
    """Message types that it answers."""
    bundles: Annotated[list[BundleHash] | None, _OrAny] = None
    """SHA-256 of the app bundles that it runs. Only this and `publishers` keep out an app that was
    changed."""
    publishers: Annotated[Annotated[dict[Name, PublicKey], Field(min_length=1)] | None, _OrAny] = (
        None
    )
    """Flower's trusted entities, ids and their ed25519 keys in OpenSSH's format: it runs bundles
    that one of them has signed. The SuperLink brings the signatures of apps from Flower's hub."""
    replies: Literal["declared", "any"] = "any"
    """``declared``: message types must be of the run's strategy, and a reply must have the records,
    keys, types and array shapes that the strategy declares for it, and nothing else."""
    paths: Literal["named", "any"] = "named"
    """``named``: a run names no file or folder on the node, only public sets, and what the owner
    has given a name (``files`` of the node's settings). Its ``data-root``, where named data sets
    lie, counts unless settings are ``listed``."""
    settings: Literal["listed", "any"] = "any"
    """``listed``: settings of runs and keys of messages must be on a list (`node.listed`), in their
    ranges, and the other bounds there hold. Needs ``replies: declared`` and ``paths: named``."""
    raw_data: Literal["never", "ask", "allowed"] = "never"
    """Whether its samples may leave it unchanged: ``never``, ``allowed``, or ``ask``: in runs
    that its owner has allowed by id (`node.raw_data_permissions`)."""
    starts: Annotated[list[Name] | None, _OrAny] = Field(default_factory=lambda: [*_NOT_REAL])
    """What its virtual data may start from: ``noise``, ``class-stats``, ``pixel-stats``,
    ``real``."""
    fewest_of_a_class: Count = 1
    """Samples that a class must have for the node to use it at all. Virtual data must not show more
    classes than have as many in the node's ``data``. Not counted with `classes`."""
    real_per_virtual: Count = 50
    """Samples of its class that the node's ``data`` must have behind each virtual image that leaves
    without differential privacy (``dp-epsilon``)."""
    classes: Annotated[Annotated[list[ClassName], Field(min_length=1)] | None, _OrAny] = None
    """Classes of its data that the node uses, by folder name or label. A node that promises
    differential privacy needs them in place of a count, which a single sample would change."""
    least_noise: Annotated[float, Field(ge=0)] = 0.0
    """Least noise multiplier of training (``train.dp-noise``). Above 0, differential privacy must
    cover all that leaves: by this noise, or by an epsilon of the strategy's own
    (``fedlgd.dp-epsilon``), which `most_epsilon` must then bound."""
    most_delta: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest delta at which a run may count its epsilon (``train.dp-delta``)."""
    most_epsilon: Annotated[Annotated[float, Field(gt=0)] | None, _OrAny] = None
    """Most epsilon that leaves the node over all runs on its data set, ever."""
    most_epochs: Annotated[Count | None, _OrAny] = None
    """Most epochs of each kind of training that a message may ask for."""
    holdout: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, _OrAny] = None
    """Share of its samples that the node holds out of training to evaluate on, always the same
    ones, drawn by a secret of its own. ``any`` leaves share and draw to the run."""
    fewest_held_out: Count = 1
    """Held-out samples that an evaluation must be on."""
    evaluation_epsilon: Annotated[Annotated[float, Field(gt=0)] | None, _OrAny] = None
    """Epsilon that each evaluation costs each held-out sample: accuracy leaves rounded, with noise
    that the node adds, and nothing else does. Needs ``replies: declared`` and `holdout`."""
    most_evaluations: Annotated[Count | None, _OrAny] = None
    """Evaluations on the node's data set over all runs, ever."""
    counts_epsilon: Annotated[Annotated[float, Field(gt=0)] | None, _OrAny] = None
    """Epsilon that counts of an evaluation cost each held-out sample: the confusion matrix alone
    leaves, with noise that the node adds. Needs ``replies: declared`` and `holdout`."""
    fewest_held_out_of_a_class: Count = 10
    """Held-out samples that each class must have, if it has any, for counts to leave. Not with
    `counts_epsilon`, whose noise is there instead."""
    counts: Literal["never", "allowed"] = "never"
    """Whether counts of held-out samples by class and prediction may leave (``evaluate.counts``).
    Where the policy promises differential privacy, they need `counts_epsilon`."""
    statistics_epsilon: Annotated[Annotated[float, Field(gt=0)] | None, _OrAny] = None
    """Epsilon that each answer with `statistics` costs each sample: the node adds noise to all
    counts. Needs ``replies: declared``."""
    statistics_floor: Count = 10
    """Samples to multiples of which `statistics` are rounded down: a cell of fewer shows none."""
    statistics: Literal["never", "allowed"] = "never"
    """Whether counts of its data may leave (``flwr-distill stats``). Where the policy promises
    differential privacy, they need `statistics_epsilon`."""
    direct_links: bool = True
    """Whether the app may send to other nodes itself, past the node. Otherwise parcels go through
    the server, and the node opens each before it leaves."""
    single_updates: Literal["never", "allowed"] = "allowed"
    """``never``: a model that was trained on its samples leaves for the server under the masks of a
    secure sum only (``secure-sums``). Needs ``replies: declared``."""
    most_bytes_a_day: Annotated[Count | None, _OrAny] = None
    """Most bytes that leave the node in 24 hours."""
    hours: Annotated[str | None, _OrAny] = None
    """When the node works, by its clock: ``20:00-06:00``."""
    sandbox: Literal["none", "where-possible", "required"] = "none"
    """Whether the app runs in a sandbox (`node.sandbox`): ``none``, ``required`` (the node does not
    start without), or ``where-possible``."""
    most_disk: Annotated[Count | None, _OrAny] = None
    """Bytes that an app in its sandbox may keep on the node's disk, in the folders of its run and
    its bundle. ``any`` is a share of what is free (`node.run_sandbox.SHARE`)."""
    readable: list[AbsolutePath] = Field(default_factory=list)
    """Absolute paths that the app may read in its sandbox, besides Python and the node's data."""

    @field_validator(*_NEEDS)
    @classmethod
    def _has_what_it_needs(cls, value: object, info: ValidationInfo) -> object:
        if value not in _OFF:
            for key, is_enough, what in _NEEDS[info.field_name or ""]:
                if not is_enough(info.data.get(key)):
                    raise ValueError(f"needs {what}")
        return value

    @field_validator("counts", "statistics")
    @classmethod
    def _have_noise(cls, value: str, info: ValidationInfo) -> str:
        promised = info.data.get("least_noise") or info.data.get("evaluation_epsilon")
        if value == "allowed" and promised and info.data.get(f"{info.field_name}_epsilon") is None:
            needed = f"needs {info.field_name}-epsilon, as the policy promises"
            raise ValueError(f"{needed} differential privacy (set it to 1.0)")
        return value

    @field_validator("hours")
    @classmethod
    def _are_two_times(cls, hours: str | None) -> str | None:
        if hours is not None:
            _times(hours)
        return hours

    @property
    def counts_classes(self) -> bool:
        """Whether how many samples a class has decides if the node uses it."""
        return self.classes is None and self.fewest_of_a_class > 1

    @property
    def promises_privacy(self) -> bool:
        """Whether something may leave under differential privacy only."""
        return self.least_noise > 0 or self.evaluation_epsilon is not None

    def works_at(self, time: datetime.time) -> bool:
        """Whether the node works at a time of day."""
        if self.hours is None:
            return True
        begin, end = _times(self.hours)
        return begin <= time < end if begin < end else time >= begin or time < end


STANDARD = Policy()
OPEN = Policy(
    paths="any",
    raw_data="allowed",
    starts=None,
    real_per_virtual=1,
    fewest_held_out_of_a_class=1,
    counts="allowed",
    statistics_floor=1,
    statistics="allowed",
)
HOSPITAL = Policy(
    strategies=["agreement", "fedavg", "fedlgd", "fedprox", "hfldd"],
    replies="declared",
    paths="named",
    settings="listed",
    raw_data="never",
    starts=["noise"],
    fewest_of_a_class=20,
    least_noise=1.0,
    most_delta=1e-5,
    most_epsilon=10.0,
    most_epochs=10,
    holdout=0.1,
    fewest_held_out=100,
    evaluation_epsilon=0.1,
    most_evaluations=50,
    direct_links=False,
    sandbox="where-possible",
)
PRESETS = {"standard": STANDARD, "open": OPEN, "hospital": HOSPITAL}


def read_policy(source: object) -> Policy:
    """Read a policy: the name of a preset, a YAML file, or the content of such a file.

    ``extends: hospital`` in it takes what it does not set from that preset, else ``standard``.
    SettingsError if it is unreadable or wrong; of an unknown key, the error names the nearest.
    """
    where = "policy"
    if isinstance(source, str | Path):
        if str(source) in PRESETS:
            return PRESETS[str(source)]
        where, source = f"policy {source}", _read(Path(source).expanduser())
    if not isinstance(source, dict):
        raise SettingsError("must have lines such as `extends: hospital`", source=where)
    values: dict[Any, Any] = dict(source)
    base = values.pop("extends", "standard")
    if not isinstance(base, str) or base not in PRESETS:
        problem = f"must be one of {', '.join(PRESETS)}"
        raise SettingsError(problem, where="extends", value=base, source=where)
    inherited = PRESETS[base].model_dump(by_alias=True)
    return Policy.checked({**inherited, **{str(k): v for k, v in values.items()}}, where)


def described(policy: Policy) -> list[str]:
    """What a policy allows and refuses, a sentence a rule."""
    p = policy
    private = (
        f"Trains with a noise multiplier of {p.least_noise:g} at least, at a delta of "
        f"{p.most_delta:g} at most"
        + ("" if p.most_epsilon is None else ", or by a strategy that keeps an epsilon by itself")
        + ", and takes no part in what differential privacy does not cover completely."
    )
    files = " and ".join(["its data", "its run's state", *p.readable])
    disk = "a quarter of the free disk" if p.most_disk is None else f"{p.most_disk:,} bytes"
    limits = f"no network but the node, no files but {files}, and {disk} at most to write."
    return [
        f"Takes part in {_any_of(p.strategies, 'any strategy')}.",
        f"Answers {_any_of(p.message_types, 'messages of any type')}.",
        f"Runs {_any_of(p.bundles, 'any app bundle, and so any code')}."
        if p.publishers is None
        else f"Runs what {_any_of(list(p.publishers), '')} signed, and of that "
        f"{_any_of(p.bundles, 'any app bundle')}.",
        "Sends what the strategy declares, and nothing else."
        if p.replies == "declared"
        else "Sends whatever the app sends.",
        "Refuses settings and messages that are not on the list of docs/asks.md."
        if p.settings == "listed"
        else "Takes any setting of a run that no other rule refuses.",
        "Reads files that its owner has named only, and public sets."
        if p.paths == "named"
        else "Reads any file that a run names.",
        {
            "never": "Never sends its samples unchanged.",
            "ask": "Sends its samples unchanged in runs that its owner has allowed to have them "
            "(flwr-distill policy allow RUN).",
            "allowed": "Sends its samples unchanged, if a run asks for them.",
        }[p.raw_data],
        f"Starts virtual data from {_any_of(p.starts, 'anything, real images too')}.",
        _classes_in_words(p),
        private if p.least_noise else "Trains without differential privacy, unless a run asks.",
        "Counts no epsilon over runs."
        if p.most_epsilon is None
        else f"Lets an epsilon of {p.most_epsilon:g} leave, over all runs on its data set, ever.",
        "Trains for as many epochs as a run asks for."
        if p.most_epochs is None
        else f"Trains for {p.most_epochs} epochs a message at most.",
        _evaluation_in_words(p),
        _counts_in_words(p),
        _statistics_in_words(p),
        "Lets the app send to other nodes directly, unseen."
        if p.direct_links
        else "Sends to other nodes through the server only, and looks into each parcel first.",
        "Sends a model that was trained on its samples by itself."
        if p.single_updates == "allowed"
        else "Sends models under the masks of a secure sum only.",
        "Sends virtual data without differential privacy as a run asks."
        if p.real_per_virtual == 1
        else "Sends virtual data with differential privacy, or with "
        f"{p.real_per_virtual} real samples behind each (none by KIP).",
        "Sends as many bytes as a run asks for."
        if p.most_bytes_a_day is None
        else f"Sends {p.most_bytes_a_day:,} bytes in 24 hours at most.",
        "Works at any hour." if p.hours is None else f"Works at {p.hours} by its own clock.",
        {
            "none": "Runs the app as this user, with its files and its network.",
            "where-possible": f"Runs the app in a sandbox, on machines that can: {limits}",
            "required": f"Runs the app in a sandbox, or does not start: {limits}",
        }[p.sandbox],
    ]


def _classes_in_words(p: Policy) -> str:
    if p.classes is not None:
        return f"Uses its classes {', '.join(p.classes)}, and no other."
    if p.fewest_of_a_class == 1:
        return "Uses classes of any size."
    needs = ", which its owner must name (classes)" if p.promises_privacy else ""
    return f"Uses only classes of {p.fewest_of_a_class:,} samples or more{needs}."


def _evaluation_in_words(p: Policy) -> str:
    which = (
        "samples that the run draws"
        if p.holdout is None
        else f"the share {p.holdout:g} of its samples, always the same"
    )
    if p.fewest_held_out > 1:
        which += f" and at least {p.fewest_held_out:,}"
    what = (
        "sends accuracy and loss unchanged"
        if p.evaluation_epsilon is None
        else f"sends accuracy with noise, at an epsilon of {p.evaluation_epsilon:g} each time"
    )
    often = "" if p.most_evaluations is None else f", {p.most_evaluations:,} times at most, ever"
    return f"Evaluates on {which}; {what}{often}."


def _counts_in_words(p: Policy) -> str:
    if p.counts == "never":
        return "Never sends counts of held-out samples."
    if p.counts_epsilon is not None:
        return (
            "Sends a confusion matrix of held-out samples with noise, at an epsilon of "
            f"{p.counts_epsilon:g} each time."
        )
    return (
        "Sends counts of held-out samples, if a run asks and each class there has "
        f"{p.fewest_held_out_of_a_class:,} or more."
    )


def _statistics_in_words(p: Policy) -> str:
    if p.statistics == "never":
        return "Never sends statistics of its data."
    noise = "" if p.statistics_epsilon is None else f", with noise at {p.statistics_epsilon:g}"
    return (
        "Sends statistics of its data, if a run asks: counts that are rounded down to multiples of "
        f"{p.statistics_floor:,}{noise and noise + ' of epsilon each time'}."
    )


def not_enforced(policy: Policy) -> list[str]:
    """What a policy does not prevent, a sentence each."""
    if policy.bundles is not None or policy.publishers is not None:
        return []
    network = ", or open connections of its own" if policy.sandbox == "none" else ""
    return [
        "Not enforced: any app bundle is run, and one that was changed can hide data in a model's "
        f"weights{network}. Name the ones you have read (bundles).",
    ]


def _any_of(names: list[str] | None, everything: str) -> str:
    if names is None:
        return everything
    return " or ".join(names) or "none"


def _read(file: Path) -> object:
    try:
        return yaml.safe_load(read_text(file))
    except (OSError, EncodingError, yaml.YAMLError) as error:
        problem = f"unreadable: {' '.join(str(error).split())}"
        remedy = f"give a YAML file, or one of {', '.join(PRESETS)}"
        raise SettingsError(problem, where=file, remedy=remedy, source="policy") from None


def _times(hours: str) -> tuple[datetime.time, datetime.time]:
    begin, _, end = hours.partition("-")
    try:
        times = tuple(datetime.datetime.strptime(t.strip(), "%H:%M").time() for t in (begin, end))
    except ValueError:
        raise ValueError("must be two times of day, as in 20:00-06:00") from None
    if times[0] == times[1]:
        raise ValueError("must be two different times of day (or any)")
    return times[0], times[1]
