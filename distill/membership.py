"""Likelihood-ratio membership inference (LiRA; Carlini et al. 2022).

Shadow models are trained on halves of the samples. For each sample, the confidences of models with
and without it give two normal distributions; the likelihood ratio of the attacked model's
confidence scores membership. Draw the attacked model's members independently of the shadow models':
if every sample were in exactly half of all models, the number of other models with it would reveal
it.
"""

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score, roc_curve

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


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

    All samples share one deviation, as in the paper when there are few models.

    Parameters
    ----------
    observed : ndarray
        (n,) confidences of the attacked model.
    confidences : ndarray
        (models, n) of the shadow models.
    trained_on : ndarray
        bool (models, n); each sample is in at least one model, and out of at least one.
    """
    inside = _log_density(observed, confidences, trained_on)
    return inside - _log_density(observed, confidences, ~trained_on)


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
