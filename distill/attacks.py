"""Membership attacks on virtual data, by an attacker with many sets of other nodes' data.

The attacker has made `distill.shadows` of random halves of the same images. What an attack sees of
an image becomes a likelihood ratio by what it sees of the other sets (LiRA).
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from flwr_distill.distill.distribution_matching import REFINE_BANK, Network, own_effort
from flwr_distill.distill.features import MIN_SIDE
from flwr_distill.distill.formation import Formation
from flwr_distill.distill.kip import RIDGE as KIP_RIDGE
from flwr_distill.distill.membership import Flags, Floats, left_out_scores
from flwr_distill.distill.ntk import ntk
from flwr_distill.distill.registry import Progress
from flwr_distill.distill.shadows import bank, features_of

ATTACKS = (
    "nearest image",
    "features",
    "trained network",
    "inversion",
    "inversion by shadows",
    "learned",
)
"""What is seen of an image: how near the nearest virtual one of its class is; how much its features
are like the mean ones of its class; how sure a network of infinite width is of its label, trained
on the virtual data (regression with its tangent kernel); its share in the mean features of its
class by least squares; the same share where shadows tell how far such means are off; what a linear
regression of membership on virtual pixels, learned from shadows, says of it."""
INVERSION_RIDGE, LEARNED_RIDGE = 0.01, 0.1
"""In mean squares of what the regression is on."""
SETS_AT_ONCE = 16
"""Seen by networks together; bounds the memory."""
COLUMNS = 4096
"""Features whose products are taken together."""
FOLDS = 8
"""Parts of the sets; each is attacked with what was learned from the others."""


def attack_scores(
    images: Tensor,
    labels: Tensor,
    members: Flags,
    versions: Tensor,
    virtual_labels: Tensor,
    *,
    num_classes: int,
    formation: int = 1,
    seed: int = 0,
    networks: Sequence[Network] = (),
    progress: Progress | None = None,
) -> Floats:
    """Log-likelihood ratios of membership, float64 (attacks, sets, n); see `ATTACKS`.

    Candidates are float32 (n, C, H, W) and int64 (n,). `members`, bool (sets, n), says which each
    set was made from, drawn with probability 1/2. What each became is decoded: float32 (versions,
    sets, m, C, H, W), int64 (m,). Of several versions, inversions and what is learned take all of
    them for one; what the other attacks see of each is added up.

    Parameters
    ----------
    formation : int (default: 1)
        Smaller images along each side of what was sent.
    seed : int (default: 0)
        Of the sets' draws.
    networks : Sequence[Network]
        That later versions were refreshed with, in place of the bank's.
    progress : callable, optional (default: None)
        Reports the sets attacked by trained networks, which take longest.
    """
    coarse = Formation.of(formation, images.shape).coarse(images)
    targets = functional.one_hot(virtual_labels, num_classes).double() - 1 / num_classes
    ratios: list[list[Floats]] = []
    of_real, of_virtual = [], []
    for virtual, network in zip(versions, (None, *networks), strict=True):
        features = matched_features(images, formation, seed, network)
        real = features(images)
        parts = [
            class_means(features(few.flatten(0, 1)).reshape(*few.shape[:2], -1), virtual_labels)
            for few in torch.split(virtual, SETS_AT_ONCE)
        ]
        # So that no network drowns the others out.
        scale = real.std(0).square().sum().sqrt().clamp_min(1e-12)
        of_virtual.append((torch.cat(parts) - real.mean(0)) / scale)
        of_real.append((real - real.mean(0)) / scale)
        margins = []
        for own in virtual:
            margins.append(_margins(own, targets, images, labels))
            if progress:
                done = len(ratios) * len(virtual) + len(margins)
                progress(done, len(versions) * len(virtual), 0.0)
        seen = (
            _nearness(coarse, labels, virtual, virtual_labels),
            _by_class(labels, of_real[-1], of_virtual[-1], _alikeness),
            torch.stack(margins),
        )
        ratios.append([left_out_scores(each.numpy(), members) for each in seen])
    real, means = torch.cat(of_real, 1), torch.cat(of_virtual, 2)
    flags = torch.from_numpy(members)
    shares = _by_class(labels, real, means, shares_by_least_squares)
    likely = _by_class(labels, real, means, shares_by_shadows, flags)
    learned = learned_log_odds(versions.transpose(0, 1).flatten(1), flags)
    inverted = [left_out_scores(each.numpy(), members) for each in (shares, likely)]
    return np.stack([*np.sum(ratios, axis=0), *inverted, learned.numpy()])


def _by_class(
    labels: Tensor, real: Tensor, means: Tensor, see: Callable[..., Tensor], *members: Tensor
) -> Tensor:
    """What is seen of each image by those of its class, (sets, n).

    Of features (n, d) of real images, (sets, classes, d) of virtual ones, and flags (sets, n).
    """
    seen = torch.empty(len(means), len(labels), dtype=torch.float64)
    for place, c in enumerate(torch.unique(labels)):
        own = labels == c
        seen[:, own] = see(real[own], means[:, place], *(flags[:, own] for flags in members))
    return seen


def _alikeness(real: Tensor, means: Tensor) -> Tensor:
    return (means @ functional.normalize(real).mT).double()


def _nearness(images: Tensor, labels: Tensor, virtual: Tensor, virtual_labels: Tensor) -> Tensor:
    """Minus the distance from each image to the nearest virtual one of its class, (sets, n)."""
    nearness = torch.empty(len(virtual), len(labels), dtype=torch.float64)
    for c in torch.unique(labels):
        own = images[labels == c].flatten(1)
        theirs = virtual[:, virtual_labels == c].flatten(2)
        nearest = [torch.cdist(own, each).amin(1) for each in theirs]
        nearness[:, labels == c] = -torch.stack(nearest).double()
    return nearness


def shares_by_least_squares(real: Tensor, means: Tensor) -> Tensor:
    """Share of each image in each mean, by ridge regression, float64 (sets, n).

    Takes features (n, d) of a class's images, and (sets, d) of virtual ones, less the mean of all.
    """
    n = len(real)
    products = _products(torch.cat([real, means]))
    ridge = INVERSION_RIDGE * products.diagonal()[:n].mean()
    return _ridge_regression(products[:n, :n], products[:n, n:], ridge).mT


def shares_by_shadows(real: Tensor, means: Tensor, members: Tensor) -> Tensor:
    """The most likely shares where shadows tell how far means are off, (sets, n) up to a factor.

    Virtual means miss those of the members: distillation ends early, and pixels are rounded. If
    these errors are normal, with the covariance that they have in the shadows, and images members
    with probability 1/2, then this regression has the posterior mean. A set's own row of `members`,
    bool (sets, n), is not used for it.
    """
    n, sets = len(real), len(means)
    products = _products(torch.cat([real, means]))
    whole = torch.eye(n + sets, dtype=torch.float64)
    # From here on rows are combinations of the images and the means.
    errors = whole[n:] - members.double() @ whole[:n] / members.sum(1, keepdim=True)
    shares = torch.empty(members.shape, dtype=torch.float64)
    for tested in _folds(sets):
        known = errors[~tested]
        middle = known.mean(0)
        directions = (known - middle) / len(known) ** 0.5
        causes = torch.cat([whole[:n] / n, directions])
        system = causes @ products @ causes.mT
        ridge = system.diagonal()[n:].sum() / real.shape[1]
        seen = causes @ products @ (whole[n:][tested] - middle).mT
        shares[tested] = _ridge_regression(system, seen, ridge)[:n].mT
    return shares


def learned_log_odds(seen: Tensor, members: Tensor) -> Tensor:
    """Log-odds of membership (sets, n), by ridge regression on what is seen of a set, (sets, d).

    These are the scores: a likelihood ratio by the predictions for other sets, which were learned
    from a set's own membership, would find that.
    """
    seen = seen.double() - seen.double().mean(0)
    targets = members.double() - 0.5  # their expectation; a mean of the others would tell of a set
    above_half = torch.empty_like(targets)
    for tested in _folds(len(seen)):
        known = seen[~tested]
        system = known @ known.mT
        ridge = LEARNED_RIDGE * system.diagonal().mean()
        weights = _ridge_regression(system, known @ seen[tested].mT, ridge)
        above_half[tested] = weights.mT @ targets[~tested]
    return 4 * above_half  # the slope of log-odds at 1/2


def _folds(sets: int) -> list[Tensor]:
    """Of each fold, which sets are attacked, bool (sets,)."""
    return [torch.arange(sets) % FOLDS == fold for fold in range(min(FOLDS, sets))]


def _products(rows: Tensor) -> Tensor:
    """Inner products of rows, float64, with few columns at a time in that type."""
    parts = (part.double() for part in torch.split(rows, COLUMNS, 1))
    return sum((part @ part.mT for part in parts), torch.zeros((), dtype=torch.float64))


def _ridge_regression(system: Tensor, right: Tensor, ridge: Tensor) -> Tensor:
    """Weights (k, m) of causes, by their products (k, k), and those with what is seen, (k, m)."""
    ridged = system + ridge * torch.eye(len(system), dtype=system.dtype)
    weights: Tensor = torch.linalg.solve(ridged, right)
    return weights


def matched_features(
    images: Tensor,
    formation: int,
    seed: int,
    network: Network | None = None,
    networks: int | None = None,
) -> Callable[[Tensor], Tensor]:
    """Features (n, d) by the networks of distribution matching, or the first `networks` of them.

    Of vectors and of images with a side below 4 pixels, the numbers themselves.
    """
    if min(images.shape[-2:]) < MIN_SIDE:
        return lambda others: others.flatten(1)
    effort = own_effort(images.shape, formation, network)
    tiles = Formation.of(formation, images.shape)

    def seen(others: Tensor) -> Tensor:
        return tiles.shrunk(others) if effort.small else others

    size = networks or (REFINE_BANK if network else effort.bank)
    pairs = bank(seen(images).shape, effort, size, seed, network)
    return lambda others: torch.cat([features_of(*pair, seen(others)) for pair in pairs], 1)


def class_means(features: Tensor, labels: Tensor) -> Tensor:
    """Mean features of each class present, (sets, classes, d), of features (sets, m, d)."""
    return torch.stack([features[:, labels == c].mean(1) for c in torch.unique(labels)], 1)


def _margins(virtual: Tensor, targets: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Of the true class before the best other one (n,), by kernel ridge regression."""
    points = virtual.flatten(1)
    system = ntk(points)[0].double()
    system.diagonal().add_(KIP_RIDGE * system.diagonal().mean())
    weights = torch.linalg.lstsq(system, targets).solution
    outputs = ntk(points, images.flatten(1))[0].double() @ weights
    own = outputs.gather(1, labels[:, None])[:, 0]
    others = outputs.scatter(1, labels[:, None], -torch.inf).amax(1)
    margins: Tensor = own - others
    return margins
