"""Likelihood-ratio membership inference (LiRA; Carlini et al. 2022).

Draw the attacked model's members independently of the shadow models': if every sample were in
exactly half of all models, the number of other models with it would reveal it.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta
from sklearn.metrics import roc_auc_score, roc_curve

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
RESAMPLES = 200
FEW, FEWER = 0.01, 0.001
"""Shares of others that are accused."""


def balanced_halves(num_models: int, num_samples: int, generator: np.random.Generator) -> Flags:
    """Membership, bool (num_models, num_samples): each sample is in half of the models."""
    ranks = generator.random((num_models, num_samples)).argsort(axis=0)
    return ranks < num_models // 2


def logit_confidence(logits: Floats, labels: NDArray[np.int64]) -> Floats:
    """``log(p / (1 - p))`` of the true class's probability p, without rounding (section IV-C).

    From logits (n, classes): the true class's logit minus the log-sum-exp of the others.
    """
    is_true = np.arange(logits.shape[1]) == labels[:, None]
    others: Floats = np.logaddexp.reduce(np.where(is_true, -np.inf, logits), axis=1)
    confidence: Floats = logits[is_true] - others
    return confidence


def membership_scores(observed: Floats, confidences: Floats, trained_on: Flags) -> Floats:
    """Log of the likelihood ratio, member to non-member, of each sample (algorithm 1, online).

    Takes confidences (n,) of the attacked model, (models, n) of shadow models, and what these were
    `trained_on`, bool (models, n). All samples share one deviation, as in the paper for few models.
    """
    inside = _log_density(observed, confidences, trained_on)
    return inside - _log_density(observed, confidences, ~trained_on)


def left_out_scores(observed: Floats, members: Flags) -> Floats:
    """Scores (models, n) of each model's samples where all other models are its shadows.

    Each sample has its own deviation, inside and outside, as in the paper for many models (section
    VI-B). A score is 0, a guess, where fewer than two other models have a sample, or do not.
    """
    centred = observed - observed.mean(axis=0)
    inside, known = _left_out_log_density(centred, members)
    outside, known_out = _left_out_log_density(centred, ~members)
    return np.where(known & known_out, inside - outside, 0.0)


class Interval(NamedTuple):
    """A value, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Curve(NamedTuple):
    """Of a ROC curve: the area, and the shares of members found where few others are accused."""

    auc: Interval
    at_1pct: Interval
    at_01pct: Interval


def curve(members: Flags, scores: Floats, generator: np.random.Generator) -> Curve:
    """The ROC curve of all models and samples, (models, n), with intervals by the bootstrap.

    Samples are drawn again with their scores by all models, because these depend on each other.
    """
    n = members.shape[1]
    order = np.argsort(-scores, axis=None, kind="stable")
    sample, member = order % n, members.ravel()[order]
    ordered = scores.ravel()[order]
    ends = np.append(ordered[1:] != ordered[:-1], True)  # equal scores are accused together

    def of(weights: Floats) -> tuple[float, float, float]:
        own = weights[sample]
        found = np.append(0.0, np.cumsum(own * member)[ends])
        accused = np.append(0.0, np.cumsum(own * ~member)[ends])
        found, accused = found / max(found[-1], 1), accused / max(accused[-1], 1)
        area = float(np.trapezoid(found, accused))
        few, fewer = (float(found[accused <= share].max()) for share in (FEW, FEWER))
        return area, few, fewer

    again = (np.bincount(generator.integers(0, n, n), minlength=n) for _ in range(RESAMPLES))
    drawn = [of(times.astype(np.float64)) for times in again]
    lows, highs = np.quantile(drawn, (0.025, 0.975), axis=0)
    values = zip(of(np.ones(n)), lows.tolist(), highs.tolist(), strict=True)
    return Curve(*(Interval(*each) for each in values))


def share_bounds(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided bounds of a share by Clopper and Pearson (1934), for any share."""
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def least_epsilon(inside: Floats, outside: Floats, delta: float, confidence: float = 0.95) -> float:
    """Epsilon that a mechanism has at least, by an attack's scores (Jagielski et al. 2020).

    A mechanism with (epsilon, delta) lets no attack have more true positives than ``e^epsilon false
    positives + delta``. The threshold is chosen on the first half of the trials and judged on the
    second. Scores (trials,), with and without the sample, are of trials with fresh noise.
    """
    half_in, half_out = len(inside) // 2, len(outside) // 2
    candidates = np.quantile(np.concatenate([inside, outside]), np.linspace(0.001, 0.999, 400))

    def bound(threshold: float, part: slice, rest: slice, above: bool) -> float:
        own, other = inside[part], outside[rest]
        if above:
            hits, alarms = int((own > threshold).sum()), int((other > threshold).sum())
        else:  # the other way round: to be sure of those who are not in
            hits, alarms = int((other <= threshold).sum()), int((own <= threshold).sum())
        sizes = (len(own), len(other)) if above else (len(other), len(own))
        least = share_bounds(hits, sizes[0], confidence)[0] - delta
        most = share_bounds(alarms, sizes[1], confidence)[1]
        return math.log(least / most) if least > most else 0.0

    first, second = slice(None, half_in), slice(None, half_out)
    options = [(threshold, above) for threshold in candidates for above in (True, False)]
    threshold, above = max(options, key=lambda o: bound(o[0], first, second, o[1]))
    return bound(threshold, slice(half_in, None), slice(half_out, None), above)


def auc(members: Flags, scores: Floats) -> float:
    """Area under the ROC curve; a guess has 0.5."""
    return float(roc_auc_score(members, scores))


def true_positives_at(false_positives: float, members: Flags, scores: Floats) -> float:
    """Share of members found with at most this share of non-members accused."""
    accused, true_positives, _ = roc_curve(members, scores, drop_intermediate=False)
    return float(true_positives[accused <= false_positives].max())


def _log_density(observed: Floats, confidences: Floats, which: Flags) -> Floats:
    """Log density of the observed under each sample's normal distribution, without constants."""
    number = which.sum(axis=0)
    mean = (confidences * which).sum(axis=0) / number
    squares = float(((confidences - mean) ** 2 * which).sum())
    variance = squares / max((number - 1).sum(), 1)
    density: Floats = -((observed - mean) ** 2) / (2 * variance) - np.log(variance) / 2
    return density


def _left_out_log_density(observed: Floats, which: Flags) -> tuple[Floats, Flags]:
    """Log density of each model's values by the other models of `which`; whether there are two."""
    number = which.sum(axis=0) - which
    total = (observed * which).sum(axis=0) - observed * which
    squares = (observed**2 * which).sum(axis=0) - observed**2 * which
    known = number >= 2
    count = np.maximum(number, 2)
    mean = total / count
    variance = np.maximum((squares - count * mean**2) / (count - 1), 1e-12)
    density: Floats = -((observed - mean) ** 2) / (2 * variance) - np.log(variance) / 2
    return density, known
