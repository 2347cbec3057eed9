"""What leaves of an evaluation under a policy: a rounded rate, with noise that the node adds.

The server chooses the model, so an exact accuracy answers any question about the held-out samples:
some dozens of crafted models read an image out of it, pixel by pixel.
"""

from __future__ import annotations

import math
import secrets
from typing import cast

from flwr.app import MetricRecord, RecordDict

from flwr_distill.node.policy import Policy
from flwr_distill.node.requests import MessageRequest, Refusal
from flwr_distill.protocol.messages import METRICS, NUM_EXAMPLES

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
    """Put noise on the rates of an evaluation, in place, and drop its other metrics."""
    epsilon, phase = policy.evaluation_epsilon, request.phase
    if epsilon is None or not request.evaluates or phase is None:
        return
    metrics = cast(dict[str, float], reply.metric_records[METRICS])
    samples = int(metrics[NUM_EXAMPLES])
    rates = {name: noisy_rate(metrics[name], samples, epsilon) for name in phase.rates}
    reply[METRICS] = MetricRecord({NUM_EXAMPLES: samples, **rates})


def noisy_rate(rate: float, samples: int, epsilon: float) -> float:
    """A share of samples with noise on their number, rounded, in [0, 1].

    The geometric mechanism (Ghosh et al. 2009): noise k has probability in proportion to
    ``exp(-epsilon |k|)``. Rounding and clipping cost nothing.
    """
    count = round(rate * samples) + _geometric(epsilon) - _geometric(epsilon)
    return round(min(max(count / samples, 0.0), 1.0), DECIMALS)


def _geometric(epsilon: float) -> int:
    """Failures before a success of probability ``1 - exp(-epsilon)``, from the system's randomness.

    The uniform number has 64 bits: noise ends beyond ``44 / epsilon``, which happens with 2^-64.
    """
    uniform = (secrets.randbits(64) + 1) / 2**64
    return int(-math.log(uniform) / epsilon)
