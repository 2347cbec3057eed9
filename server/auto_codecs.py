"""``down-codec`` and ``up-codec`` = ``auto``: codecs by what they cost in accuracy on nodes.

After rounds 1, 2, 4, 8 and so on a few nodes evaluate the model, and the model as codecs make it,
by ordinary ``evaluate`` messages. The smallest codec that costs under half a point is used until
the next check. Where this cannot be known, models travel as float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.base.text import counted
from flwr_distill.protocol.arrays import as_arrays, as_record, num_bytes
from flwr_distill.protocol.coded import DELTA, DownCodec, UpCodec, coded, decoded
from flwr_distill.protocol.messages import ARRAYS, CONFIG, METRICS, NUM_EXAMPLES, SERVER_ROUND
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
DELTA_SHARE = 0.5
"""``fraction-train`` from which models to nodes are coded as differences."""
NOT_CHECKED = "no check so far: the first is after round 1"
ON_LOOPBACK = "all nodes with codecs are on loopback"
NO_CODECS = "no node has codecs"
NO_EVALUATION = "no node evaluated on held-out samples (train.holdout, and nodes' policies)"
TOO_COSTLY = "all smaller codecs cost half a point or more"
PERSONAL = "nodes keep models of their own, so there is no common one to evaluate"
SECURE_SUMS = "secure sums are of exact numbers under masks"


@dataclass(frozen=True)
class Score:
    """A node's accuracy on so many held-out samples, as it says."""

    accuracy: float
    samples: int


Scores = Mapping[int, Score]
"""By node."""


def weights_of(exact: Scores) -> dict[int, int]:
    """Each node's samples, but no more than the median node has: claims beyond count for nothing.

    Of an even number of nodes it is the lower median.
    """
    counts = sorted(score.samples for score in exact.values())
    most = counts[(len(counts) - 1) // 2]
    return {node: min(score.samples, most) for node, score in exact.items()}


def cost_of(exact: Scores, tried: Scores) -> float:
    """Accuracy that a codec costs: the median of the nodes' losses, weighted by `weights_of`.

    The upper median, so that of two nodes the one with the larger loss counts. A lying minority
    moves it no further than what single honest nodes lose. A node that evaluated only the exact
    model has lost all.

    Parameters
    ----------
    exact, tried : Mapping[int, Score]
        Scores of the exact model, of one node at least, and of the coded one.

    Returns
    -------
    float
        In [-1, 1]; infinite if half of the weight has not evaluated the coded model.
    """
    weights = weights_of(exact)
    losses = {
        node: score.accuracy - tried[node].accuracy if node in tried else math.inf
        for node, score in exact.items()
    }
    left = sum(weights.values())
    total = left
    for node in sorted(losses, key=lambda node: losses[node]):
        left -= weights[node]
        if 2 * left < total:
            return losses[node]
    raise ValueError("no node evaluated the exact model")


def mean_of(scores: Scores, weights: Mapping[int, int]) -> float | None:
    """Mean accuracy of nodes by weights; None without any."""
    nodes = scores.keys() & weights.keys()
    total = sum(weights[node] for node in nodes)
    if not total:
        return None
    return math.fsum(weights[node] * scores[node].accuracy for node in sorted(nodes)) / total


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
        self._next = 2 * server_round
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
        exact = _scores(grid, nodes, model, server_round)
        if not exact:
            return self._exact(NO_EVALUATION)
        weights = weights_of(exact)
        tried: list[dict[str, Any]] = []
        name, reason = "float32", TOO_COSTLY
        for candidate in LADDER:
            record, share = as_coded(model, earlier, candidate, self.ways, rng)
            scores = _scores(grid, sorted(exact), record, server_round)
            cost = cost_of(exact, scores)
            tried.append(
                {
                    "name": candidate,
                    "accuracy": mean_of(scores, weights),
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
            "accuracy": mean_of(exact, weights),
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
    grid: RunGrid, nodes: Sequence[int], model: ArrayRecord, server_round: int
) -> dict[int, Score]:
    """The scores of those nodes that evaluated a model."""
    content = RecordDict({ARRAYS: model, CONFIG: ConfigRecord({SERVER_ROUND: server_round})})
    messages = [Message(content, node, MessageType.EVALUATE) for node in nodes]
    found = {}
    for reply in grid.ask_aside(messages):
        if reply.has_content() and (score := _score_in(reply.content)):
            found[reply.metadata.src_node_id] = score
    return found


def _score_in(content: RecordDict) -> Score | None:
    """The score in a reply, which may be of any app; None without a usable one."""
    metrics = content.metric_records.get(METRICS, MetricRecord())
    accuracy, samples = metrics.get("eval-accuracy"), metrics.get(NUM_EXAMPLES)
    if not isinstance(accuracy, int | float) or not isinstance(samples, int | float):
        return None
    if not (0 <= accuracy <= 1 and 1 <= samples < math.inf):
        return None
    return Score(float(accuracy), int(samples))
