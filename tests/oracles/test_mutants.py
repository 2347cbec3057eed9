"""Each equation, made wrong in our code, fails the oracle of its system."""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.mutants import copy_tree, failed, run_tests

pytestmark = pytest.mark.matrix

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A change of an equation, and the test of this folder that fails with it."""

    equation: str
    file: str
    before: str
    after: str
    test: str


FEDHEAD, PLUS = (
    f"test_fedhead.py::test_five_rounds_are_those_of_the_paper[fedhead{name}-cifar10]"
    for name in ("", "-plus")
)
CADIS = "test_cadis.py::test_five_rounds_are_those_of_the_paper[centred-one-step]"
GAUSSIAN = "test_cadis.py::test_five_rounds_are_those_of_the_paper[gaussian-none]"
HFLDD, LABELS, GROUPS = (
    f"test_hfldd.py::test_{name}_are_those_of_the_paper"
    for name in ("five_rounds", "soft_labels", "groups_and_clusters")
)
KIP = "test_hfldd.py::test_the_loss_of_kip_and_its_gradient_are_those_of_the_paper[True]"
FEDLGD = "test_fedlgd.py::test_five_rounds_are_those_of_the_paper"

MUTANTS = (
    Mutant(
        "FedHEAD, eq. 9: sectors are averaged without p_km",
        "strategies/fedhead/client.py",
        "robust_mean(rule, [counts[rank] for rank in norms]",
        "robust_mean(rule, [1 for rank in norms]",
        FEDHEAD,
    ),
    Mutant(
        "FedHEAD, eq. 10: the server averages without p_m",
        "strategies/fedhead/strategy.py",
        "mean = weighted_mean(sectors.values())",
        "mean = weighted_mean((1, arrays) for _, arrays in sectors.values())",
        FEDHEAD,
    ),
    Mutant(
        "FedHEAD, eq. 4: the teacher without p_km",
        "strategies/fedhead/client.py",
        '"weights": [(rank, weight) for',
        '"weights": [(rank, 1.0) for',
        FEDHEAD,
    ),
    Mutant(
        "FedHEAD, eq. 4: the divergence the other way round",
        "distill/ensemble.py",
        'functional.kl_div(logits.log_softmax(dim=1), teacher, reduction="batchmean")',
        'functional.kl_div((teacher + TINY).log(), logits.softmax(1), reduction="batchmean")',
        FEDHEAD,
    ),
    Mutant(
        "FedHEAD, early stopping: one epoch later",
        "distill/ensemble.py",
        "elif epoch - best_epoch >= patience:",
        "elif epoch - best_epoch > patience:",
        FEDHEAD,
    ),
    Mutant(
        "FedHEAD+: the server's teacher without p_m",
        "strategies/fedhead/plus.py",
        "self._distil(sectors, weighted_mean(sectors)",
        "self._distil([(1, z_m) for _, z_m in sectors], weighted_mean(sectors)",
        PLUS,
    ),
    Mutant(
        "CADIS, eq. 1: large clusters weigh more",
        "strategies/cadis/similarity.py",
        "if sizes is None else sizes)",
        "if sizes is None else 1 / sizes)",
        CADIS,
    ),
    Mutant(
        "CADIS, eq. 11: weights are compared in place of their changes",
        "strategies/cadis/strategy.py",
        "changes = np.stack([(weights - start).ravel()",
        "changes = np.stack([weights.ravel()",
        CADIS,
    ),
    Mutant(
        "CADIS, eq. 12: the sum over rounds in place of the mean",
        "strategies/cadis/similarity.py",
        "return self.sums / self.counts",
        "return self.sums",
        CADIS,
    ),
    Mutant(
        "CADIS, eq. 13: S in place of Q",
        "strategies/cadis/similarity.py",
        "float(low + eps * (high - low))",
        "float(eps)",
        CADIS,
    ),
    Mutant(
        "CADIS, transitive learning: no pair is estimated",
        "strategies/cadis/similarity.py",
        "alike = generator.normal(means, deviations) > needed",
        "alike = generator.normal(means, deviations) > 2",
        GAUSSIAN,
    ),
    Mutant(
        "CADIS, eq. 18: far samples are the similar ones",
        "strategies/cadis/client.py",
        "functional.log_softmax(-squared / (2 * variance), dim=1)",
        "functional.log_softmax(squared / (2 * variance), dim=1)",
        GAUSSIAN,
    ),
    Mutant(
        "CADIS, eq. 19: KL of student and teacher the other way round",
        "strategies/cadis/client.py",
        "functional.kl_div(student, teacher,",
        "functional.kl_div(teacher, student,",
        GAUSSIAN,
    ),
    Mutant(
        "HFLDD, eq. 4: KL of S_j and S_i",
        "strategies/hfldd/clustering.py",
        "(entropies[:, None] - probabilities @ logs.T)",
        "(entropies[None] - logs @ probabilities.T)",
        GROUPS,
    ),
    Mutant(
        "HFLDD, algorithm 1: ends with the smallest group",
        "strategies/hfldd/clustering.py",
        "largest = max(len(group) for group in shuffled)",
        "largest = min(len(group) for group in shuffled)",
        GROUPS,
    ),
    Mutant(
        "HFLDD, label knowledge: one step more than E1",
        "client/training.py",
        "islice(endless, steps)",
        "islice(endless, steps + 1)",
        LABELS,
    ),
    Mutant(
        "HFLDD, eq. 1: the sign of Y_T",
        "distill/kip.py",
        "(K_ts.double() @ weights - real_targets)",
        "(K_ts.double() @ weights + real_targets)",
        KIP,
    ),
    Mutant(
        "HFLDD, eq. 1: its gradient's sign by K_SS",
        "distill/kip.py",
        "by_system = -narrow_dual @ weights.mT",
        "by_system = narrow_dual @ weights.mT",
        KIP,
    ),
    Mutant(
        "HFLDD, algorithm 2: heads weigh by their own samples alone",
        "client/local_round.py",
        "{NUM_EXAMPLES: len(samples), **trained.numbers()}",
        "{NUM_EXAMPLES: len(self.session.data.train), **trained.numbers()}",
        HFLDD,
    ),
    Mutant(
        "FedLGD, eq. 1: virtual images move away from real ones",
        "distill/distribution_matching.py",
        ".mean(1).sub(means).square()",
        ".mean(1).add(means).square()",
        FEDLGD,
    ),
    Mutant(
        "FedLGD, eq. 2: without lambda",
        "strategies/fedlgd/client.py",
        "return self._weight * loss",
        "return loss",
        FEDLGD,
    ),
    Mutant(
        "FedLGD, eq. 4: the sign",
        "distill/contrastive.py",
        "losses = -of_positives /",
        "losses = of_positives /",
        FEDLGD,
    ),
    Mutant(
        "FedLGD, eq. 4: the anchor is among those it is compared with",
        "distill/contrastive.py",
        ".masked_fill(itself, -torch.inf)",
        "",
        FEDLGD,
    ),
    Mutant(
        "FedLGD, eq. 5: against the clients' gradient",
        "strategies/fedlgd/strategy.py",
        "as_tensors(target),",
        "{name: -array for name, array in as_tensors(target).items()},",
        FEDLGD,
    ),
    Mutant(
        "FedLGD, eq. 6: one direction for a layer, not for each output node",
        "distill/gradient_matching.py",
        "functional.cosine_similarity(x.flatten(1), y.flatten(1))",
        "functional.cosine_similarity(x.flatten()[None], y.flatten()[None])",
        FEDLGD,
    ),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_tree(ROOT, tmp_path_factory.mktemp("mutants") / "tree")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.equation)
def test_a_wrong_equation_is_noticed(mutant, tree):
    file = tree / mutant.file
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.before) == 1
    file.write_text(source.replace(mutant.before, mutant.after))
    try:
        test = f"tests/oracles/{mutant.test}"
        code, output = run_tests(tree, "-q", "-n", "0", "-rf", test)
    finally:
        shutil.copy2(ROOT / mutant.file, file)
    assert code == 1, output
    assert failed(output) == [test], output
    assert "AssertionError" in output, output
