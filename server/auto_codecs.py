"""``down-codec`` and ``up-codec`` = ``auto``: codecs by what they cost in accuracy on nodes.

After rounds 1, 2, 4, 8 and so on a few nodes evaluate the model, and the model as codecs make it,
by ordinary ``evaluate`` messages. The smallest codec that costs under half a point is used until
the next check. Where this cannot be known, models travel as float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from statistics import fmean
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.base.text import counted
from flwr_distill.protocol.arrays import as_arrays, as_record, num_bytes
from flwr_distill.protocol.coded import DELTA, DownCodec, UpCodec, coded, decoded
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS, SERVER_ROUND
from flwr_distill.server.grid.codec import ModelCodec
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.roster import Roster
from flwr_distill.server.settings import RunSettings

LADDER = ("int4", "int8", "float16")
"""Codecs that are tried, the smallest first; ``float32`` is left if none is good enough."""
MAX_COST = 0.005
"""Accuracy that a codec must cost less than: half a point."""
MAX_NODES = 5
"""Nodes that take part in a check."""
PATIENCE, MIN_PATIENCE = 3.0, 30.0
"""Times what the exact model took in which nodes evaluate a coded one, and seconds at least."""
DELTA_SHARE = 0.5
"""``fraction-train`` from which models to nodes are coded as differences."""
NOT_CHECKED = "no check so far: the first is after round 1"
ON_LOOPBACK = "all nodes with codecs are on loopback"
NO_CODECS = "no node has codecs"
NO_EVALUATION = "no node evaluated on held-out samples (train.holdout, and nodes' policies)"
TOO_COSTLY = "all smaller codecs cost half a point or more"
PERSONAL = "nodes keep models of their own, so there is no common one to evaluate"
SECURE_SUMS = "secure sums are of exact numbers under masks"


Scores = Mapping[int, float]
"""Accuracy on held-out samples by node, as it says."""


def cost_of(exact: Scores, tried: Scores) -> float:
    """Accuracy that a codec costs: the median of the nodes' losses, each node counting once.

    The upper median, so that of two nodes the one with the larger loss counts. So a lying minority
    moves it no further than what single honest nodes lose. A node that evaluated only the exact
    model has lost all. Nodes' samples are no weights: a few with many of them, or that claim so,
    would decide alone.

    Parameters
    ----------
    exact, tried : Mapping[int, float]
        Scores of the exact model, of one node at least, and of the coded one.

    Returns
    -------
    float
        In [-1, 1]; infinite if half of the nodes have not evaluated the coded model.
    """
    losses = sorted(
        accuracy - tried[node] if node in tried else math.inf for node, accuracy in exact.items()
    )
    return losses[len(losses) // 2]


@dataclass(frozen=True)
class Ways:
    """Which ways ``auto`` is for: models to nodes, as differences or whole, and replies."""

    down: bool
    up: bool
    delta: bool

    def down_codec(self, name: str) -> DownCodec:
        """Name of a codec on the way to nodes."""
        is_delta = self.delta and name != "float32"
        return cast(DownCodec, f"{DELTA if is_delta else ''}{name}")


def as_coded(
    model: ArrayRecord, earlier: ArrayRecord, name: str, ways: Ways, rng: np.random.Generator
) -> tuple[ArrayRecord, float]:
    """The model of a round as nodes would get it with a codec, and its share of bytes.

    What the round changed in the `earlier` model is coded as replies are, and what comes of it as
    models to nodes are. This is coarser than what happens: rounding of many replies averages out.
    """
    start = as_arrays(earlier)
    record, sizes = model, []
    for is_used, base in ((ways.up, start), (ways.down, start if ways.delta else None)):
        if is_used:
            sent, _ = coded(record, name, rng, base)
            sizes.append(num_bytes(sent))
            record = as_record(as_arrays(decoded(sent, base)))
    return record, sum(sizes) / (len(sizes) * num_bytes(model))


@dataclass
class AutoCodecs:
    """Chooses a run's codecs after some rounds; see the module.

    Parameters
    ----------
    codec : ModelCodec
        The run's, which gets the choices.
    ways : Ways
        Which ways are chosen for.
    seed : int
        Of the run.
    obstacle : str (default: "")
        Why no check is possible; empty if one is.
    """

    codec: ModelCodec
    ways: Ways
    seed: int
    obstacle: str = ""
    _next: int = 1
    """The round after which the next check is due."""
    _name: str = "float32"
    _reason: str = ""
    """Why it is float32, as last reported."""
    _unneeded: str = field(default=NO_CODECS, init=False)

    def meet(self, roster: Roster) -> None:
        """Take note of which nodes are beyond loopback: where any is, codecs may change."""
        self._unneeded = "" if roster.over_networks else ON_LOOPBACK
        if not roster.with_codecs:
            self._unneeded = NO_CODECS
        self.codec.may_change = not self._unneeded and not self.obstacle

    def end_round(
        self, server_round: int, earlier: ArrayRecord, model: ArrayRecord, grid: RunGrid
    ) -> dict[str, Any] | None:
        """Check if it is due after this round; give the choice with its evidence, or None.

        A round that left the model as it was is not checked: the next one is.

        Parameters
        ----------
        server_round : int
            The round that ends.
        earlier, model : ArrayRecord
            The model before and after it.
        grid : RunGrid
            Reaches the nodes.
        """
        if reason := self.obstacle or self._unneeded:
            return self._exact(reason)
        if server_round == 0:
            return self._exact(NOT_CHECKED)
        if server_round < self._next or model is earlier:
            return None
        return self._checked(server_round, earlier, model, grid)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to choose as this one does."""
        return {"next": self._next, "name": self._name, "reason": self._reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the choice of a checkpoint."""
        self._next, self._reason = state["next"], state["reason"]
        self._use(state["name"])

    def _checked(
        self, server_round: int, earlier: ArrayRecord, model: ArrayRecord, grid: RunGrid
    ) -> dict[str, Any] | None:
        rng = np.random.default_rng([self.seed, server_round])
        able = [node for node in grid.get_node_ids() if node not in grid.busy]
        chosen = sorted(rng.permutation(len(able))[:MAX_NODES])
        nodes = [able[place] for place in chosen]
        if not nodes:  # all still train: a later round is checked
            return None
        self._next = 2 * server_round
        start = time.monotonic()
        exact = _scores(grid, nodes, model, server_round)
        if not exact:
            return self._exact(NO_EVALUATION)
        patience = max(MIN_PATIENCE, PATIENCE * (time.monotonic() - start))
        left = sorted(exact)
        tried: list[dict[str, Any]] = []
        name, reason = "float32", TOO_COSTLY
        for candidate in LADDER:
            record, share = as_coded(model, earlier, candidate, self.ways, rng)
            scores = _scores(grid, left, record, server_round, patience)
            left = sorted(scores)  # who is silent once is not waited for again
            cost = cost_of(exact, scores)
            tried.append(
                {
                    "name": candidate,
                    "accuracy": fmean(scores.values()) if scores else None,
                    "cost": cost if math.isfinite(cost) else None,
                    "share": round(share, 4),
                }
            )
            if cost < MAX_COST:
                name, reason = candidate, ""
                break
        self._use(name)
        self._reason = reason
        choice = {
            **self._names(),
            "reason": reason,
            "nodes_asked": len(nodes),
            "nodes_counted": len(exact),
            "accuracy": fmean(exact.values()),
            "tried": tried,
        }
        log(INFO, "Codecs: %s", described(choice))
        return choice

    def _exact(self, reason: str) -> dict[str, Any] | None:
        """Use float32 for a reason; give the choice if it is news."""
        self._use("float32")
        if reason == self._reason:
            return None
        self._reason = reason
        level = WARNING if reason in (NO_EVALUATION, PERSONAL) else INFO
        choice = {**self._names(), "reason": reason}
        log(level, "Codecs: %s", described(choice))
        return choice

    def _use(self, name: str) -> None:
        self._name = name
        if self.ways.down:
            self.codec.down = self.ways.down_codec(name)
        if self.ways.up:
            self.codec.up = cast(UpCodec, name)

    def _names(self) -> dict[str, str]:
        return {"name": self._name, "down": self.codec.down, "up": self.codec.up}


def auto_codecs_of(
    settings: RunSettings, codec: ModelCodec, *, personal: bool
) -> AutoCodecs | None:
    """Make what chooses a run's codecs; None where its settings name them.

    With secure sums replies stay float32. With `personal` models there is nothing to evaluate.
    """
    down, up = settings.down_codec == "auto", settings.up_codec == "auto"
    if not down and not up:
        return None
    obstacle = PERSONAL if personal else ""
    if up and settings.secure_sums:
        up = False
        obstacle = obstacle or ("" if down else SECURE_SUMS)
        log(INFO, "up-codec: float32 (%s)", SECURE_SUMS)
    ways = Ways(down, up, delta=settings.fraction_train >= DELTA_SHARE)
    return AutoCodecs(codec, ways, settings.seed, obstacle)


def described(choice: Mapping[str, Any]) -> str:
    """A choice in a line, with its evidence."""
    text = f"down {choice['down']}, up {choice['up']}"
    if choice["reason"]:
        text += f": {choice['reason']}"
    if "tried" not in choice:
        return text
    scores = [f"exact {100 * choice['accuracy']:.2f} %"]
    for one in choice["tried"]:
        cost = "not evaluated" if one["cost"] is None else f"costs {100 * one['cost']:.2f} points"
        scores.append(f"{one['name']} {cost}, {100 * one['share']:.0f} % of the bytes")
    return f"{text} ({'; '.join(scores)}; on {counted(choice['nodes_counted'], 'node')})"


def _scores(
    grid: RunGrid,
    nodes: Sequence[int],
    model: ArrayRecord,
    server_round: int,
    patience: float | None = None,
) -> dict[int, float]:
    """The scores of those nodes that evaluated a model, within so many seconds if given."""
    content = RecordDict({ARRAYS: model, CONFIG: ConfigRecord({SERVER_ROUND: server_round})})
    messages = [Message(content, node, MessageType.EVALUATE) for node in nodes]
    found = {}
    for reply in grid.ask_aside(messages, patience):
        if reply.has_content() and (score := _score_in(reply.content)) is not None:
            found[reply.metadata.src_node_id] = score
    return found


def _score_in(content: RecordDict) -> float | None:
    """The score in a reply, which may be of any app; None without a usable one."""
    accuracy = content.metric_records.get(METRICS, MetricRecord()).get("eval-accuracy")
    is_score = isinstance(accuracy, int | float) and 0 <= accuracy <= 1
    return float(accuracy) if is_score else None  # type: ignore[arg-type]
