"""What leaves of an evaluation under a policy: a rounded rate, with noise that the node adds.

The server chooses the model, so an exact accuracy answers any question about the held-out samples:
some dozens of crafted models read an image out of it, pixel by pixel.
"""

from __future__ import annotations

import math
import secrets
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, MessageType, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_distill.node.policy import Policy
from flwr_distill.node.requests import MessageRequest, Refusal
from flwr_distill.protocol.counts import (
    COUNTS,
    WITHHELD,
    Reason,
    counts_record,
    no_counts,
    read_counts,
    why_withheld,
)
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES
from flwr_distill.task.scores import Counts

DECIMALS = 2
"""Of a rate that leaves: fewer bits than its noise has, for an app to hide others in."""


def judge_evaluation(
    policy: Policy, request: MessageRequest, reply: RecordDict, samples: int | None
) -> Refusal | None:
    """Why a policy refuses an evaluation; None if it does not.

    `samples` are those of the node's data, as it counts them itself; None if it cannot.
    """
    if not request.evaluates:
        return None
    claim = reply.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES, 0)
    number = claim if isinstance(claim, int) else 0
    if number < policy.fewest_held_out:
        reason = f"{policy.fewest_held_out:,}, and fewer samples of this node are held out"
        return Refusal("fewest-held-out", f"{reason} (set fraction-evaluate = 0)")
    if samples is not None and number > samples:
        return Refusal("replies", "the app claims an evaluation on more samples than there are")
    return None


def drop_details(policy: Policy, request: MessageRequest, reply: RecordDict) -> None:
    """Set metrics of an evaluation that do not leave to 0, in place, before the reply is judged.

    A loss that is no number would have it refused, an exact answer that costs nothing: crafted
    models overflow if a held-out sample has a pixel above some value.
    """
    if policy.evaluation_epsilon is None or not request.evaluates or request.phase is None:
        return
    metrics = reply.metric_records.get(METRICS, MetricRecord())
    for name in metrics.keys() - {NUM_EXAMPLES, *request.phase.rates}:
        metrics[name] = 0.0


def cost_of(policy: Policy, request: MessageRequest) -> float:
    """Epsilon that an evaluation costs each held-out sample; 0 where it leaves unchanged."""
    if policy.evaluation_epsilon is None or not request.evaluates or request.phase is None:
        return 0.0
    return policy.evaluation_epsilon * len(request.phase.rates)


def blur(policy: Policy, request: MessageRequest, reply: RecordDict) -> None:
    """Put noise on the rates and counts of an evaluation, in place; drop its other metrics."""
    epsilon, phase = policy.evaluation_epsilon, request.phase
    _blur_counts(policy, reply)
    if epsilon is None or not request.evaluates or phase is None:
        return
    metrics = cast(dict[str, float], reply.metric_records[METRICS])
    samples = int(metrics[NUM_EXAMPLES])
    rates = {name: noisy_rate(metrics[name], samples, epsilon) for name in phase.rates}
    reply[METRICS] = MetricRecord({NUM_EXAMPLES: samples, **rates})


def _blur_counts(policy: Policy, reply: RecordDict) -> None:
    record = reply.config_records.get(COUNTS, no_counts("policy"))
    if policy.counts_epsilon is None or WITHHELD in record:
        return
    counts = read_counts(record)
    noisy = Counts.of_confusion(noisy_confusion(counts.confusion, policy.counts_epsilon))
    reply[COUNTS] = counts_record(noisy, confusion_alone=True)


def judge_counts(
    policy: Policy, request: MessageRequest, reply: RecordDict, *, left: float
) -> float:
    """Put a reason in place of counts that may not leave; give the epsilon that they cost.

    `left` is what the account has room for. All leave or none: small cells are mostly errors, and
    a matrix without them would make the model look better than it is. Whether there is a record
    follows from the run alone, and with `counts-epsilon` malformed counts cost as much as others:
    an app could answer by these.
    """
    if request.message_type != MessageType.EVALUATE:
        return 0.0
    record = reply.config_records.get(COUNTS)
    if record is not None:
        del reply[COUNTS]
    if not request.asks_for_counts:
        return 0.0
    epsilon = policy.counts_epsilon
    reason: Reason | None = None
    if policy.counts == "never":
        reason = "policy"
    elif epsilon is not None and epsilon > left:
        reason = "budget"
    elif epsilon is None and request.is_private:
        reason = "privacy"
    if reason is not None:
        reply[COUNTS] = no_counts(reason)
        return 0.0
    samples = reply.metric_records.get(METRICS, MetricRecord()).get(NUM_EXAMPLES)
    reply[COUNTS] = _usable(policy, record or ConfigRecord(), samples)
    return epsilon or 0.0


def _usable(policy: Policy, record: ConfigRecord, samples: object) -> ConfigRecord:
    exact = policy.counts_epsilon is None
    if exact and (reason := why_withheld(record)):
        return no_counts(reason)
    try:
        counts = read_counts(record)
    except ValueError:
        return no_counts("malformed")
    if counts.samples != samples:
        return no_counts("malformed")
    sizes = counts.confusion.sum(1)
    if exact and min(sizes[sizes > 0]) < policy.fewest_held_out_of_a_class:
        return no_counts("few")
    return record


def noisy_confusion(confusion: NDArray[np.int64], epsilon: float) -> NDArray[np.int64]:
    """A confusion matrix with noise in each cell, of as many samples, without negative numbers.

    The number of samples is known, so of two data sets one sample differs: it moves a count from
    one cell to another, by 2 in all. So each cell gets geometric noise of ``epsilon / 2``
    (`noisy_rate`). What follows costs nothing: the nearest matrix (least squares) without negative
    cells that has the sum, and rounding by largest remainders.
    """
    total = int(confusion.sum())
    noise = [geometric(epsilon / 2) - geometric(epsilon / 2) for _ in range(confusion.size)]
    noisy = confusion.ravel() + np.array(noise, float)
    falling = -np.sort(-noisy)
    levels = (np.cumsum(falling) - total) / np.arange(1, noisy.size + 1)
    level = levels[np.nonzero(falling > levels)[0][-1]]
    near = np.maximum(noisy - level, 0)
    whole: NDArray[np.int64] = np.floor(near).astype(np.int64)
    rest = np.argsort(whole - near, kind="stable")[: total - int(whole.sum())]
    whole[rest] += 1
    return whole.reshape(confusion.shape)


def noisy_rate(rate: float, samples: int, epsilon: float) -> float:
    """A share of samples with noise on their number, rounded, in [0, 1].

    The geometric mechanism (Ghosh et al. 2009): noise k has probability in proportion to
    ``exp(-epsilon |k|)``. Rounding and clipping cost nothing.
    """
    count = round(rate * samples) + geometric(epsilon) - geometric(epsilon)
    return round(min(max(count / samples, 0.0), 1.0), DECIMALS)


def geometric(epsilon: float) -> int:
    """Failures before a success of probability ``1 - exp(-epsilon)``, from the system's randomness.

    The uniform number has 64 bits: noise ends beyond ``44 / epsilon``, which happens with 2^-64.
    """
    uniform = (secrets.randbits(64) + 1) / 2**64
    return int(-math.log(uniform) / epsilon)
