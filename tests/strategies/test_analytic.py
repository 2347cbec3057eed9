"""Closed-form heads with our real ClientApp; only the wire is a grid in memory."""

import json
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from numpy.testing import assert_allclose
from scipy.special import softmax
from sklearn.metrics import log_loss

from flwr_distill.client import features
from flwr_distill.distill.analytic import (
    STRENGTHS,
    Sums,
    best_penalty,
    best_shrinkage,
    clipped,
    deviations,
    discriminant,
    noisy_penalty,
    ridge,
)
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.registry import find_method, phases_of
from flwr_distill.strategies.analytic.method import (
    BY_CLASS,
    COUNTS,
    EVALUATE_OWN,
    GRAM,
    SUMS,
    TRAIN_SUMS,
    UNIT,
    means_of,
    sums_of,
)
from flwr_distill.strategies.analytic.strategy import Analytic
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.task.backbones import Frozen
from flwr_distill.task.backbones.random_features import RandomFourier
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import (
    TaskSettings,
)
from flwr_distill.task.source import partition_samples
from tests.grids import screening_grid

from .naive import play, sessions, start
from .rounds import FIRST, spoil

WIDTH = 128
SPEC = load_dataset("digits").spec
NARROW = f"{__name__}:narrow"
CONFIG = {"dataset": "digits", "model": NARROW, "seed": 0, "train.holdout": 0.0}
IID = {**CONFIG, "partition.scheme": "iid"}
SKEWS = {
    "iid": (IID, 6),
    "dirichlet 0.01": ({**CONFIG, "partition.scheme": "dirichlet", "partition.alpha": 0.01}, 8),
    "one class a node": ({**CONFIG, "partition.classes": 1}, 10),
}


def narrow(spec):
    """Few features, so that tests are quick."""
    return Frozen(RandomFourier(64, WIDTH), WIDTH, spec)


MODEL = create_model(NARROW, SPEC, seed=0)


def strategy_of(**settings):
    return Analytic(model=MODEL, **settings)


def of_record(record):
    arrays = as_arrays(record)
    return arrays["head.weight"], arrays["head.bias"]


def samples_of(config, num_nodes, model=MODEL):
    """Features as nodes keep them, and labels, of each node."""
    settings = TaskSettings.from_run_config(config)
    for place in range(num_nodes):
        part = partition_samples(settings, place, num_nodes).to_samples(SPEC)
        with torch.inference_mode():
            features = model.eval().network(part.inputs)
        features = torch.nn.functional.normalize(features).half().numpy()
        yield clipped(features, 1.0), part.labels.numpy()


def ridge_of(sums):
    return ridge(sums, best_penalty(sums))


def pooled(config, num_nodes, head=ridge_of, places=None, model=MODEL):
    """The head of all these nodes' samples in one place."""
    nodes = enumerate(samples_of(config, num_nodes, model))
    parts = [part for place, part in nodes if places is None or place in places]
    features, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    return head(Sums.of(features, labels, SPEC.num_classes))


def assert_head(record, head, tolerance=1e-5):
    weight, bias = of_record(record)
    assert_allclose(weight, head.weight, atol=tolerance, rtol=0)
    assert_allclose(bias, head.bias, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("config", "nodes"), SKEWS.values(), ids=list(SKEWS))
def test_the_head_is_the_pooled_one_at_any_skew(client_grid, config, nodes):
    arrays = play(strategy_of(), client_grid(nodes, config), 1, start(MODEL))
    assert_head(arrays, pooled(config, nodes))


def test_the_head_is_the_pooled_one_from_nodes_of_12_to_1200_samples(client_grid, tmp_path):
    sizes, place = [12, 24, 50, 151, 1200], 0
    parts = {}
    for node, size in enumerate(sizes):
        parts[str(node)] = list(range(place, place + size))
        place += size
    (tmp_path / "sizes.json").write_text(json.dumps(parts))
    file = {"partition.scheme": "index-file", "partition.index-file": str(tmp_path / "sizes.json")}
    config = {**CONFIG, **file}
    arrays = play(strategy_of(), client_grid(5, config), 1, start(MODEL))
    assert_head(arrays, pooled(config, 5))


def test_the_head_is_the_pooled_one_also_where_the_least_penalty_is_chosen(client_grid):
    config = {**SKEWS["one class a node"][0], "model": f"{__name__}:wide"}
    model = create_model(f"{__name__}:wide", SPEC, seed=0)
    strategy = Analytic(model=model)
    arrays = play(strategy, client_grid(2, config), 1, start(model))
    whole = pooled(config, 2, lambda sums: sums, model=model)
    top = np.linalg.eigvalsh(centred(whole))[-1]
    assert best_penalty(whole) == pytest.approx(STRENGTHS[0] * top)
    assert_head(arrays, ridge_of(whole))


def wide(spec):
    """More features than samples of a class."""
    return Frozen(RandomFourier(64, 1024), 1024, spec)


def centred(sums):
    mean = sums.by_class.sum(0) / sums.size
    return sums.gram - sums.size * np.outer(mean, mean)


def test_the_order_in_which_nodes_answer_changes_nothing(client_grid):
    heads = []
    for order in (1, -1):
        grid, strategy = client_grid(5, IID), strategy_of()
        asked = strategy.configure_train(1, start(MODEL), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(asked))[::order]
        arrays, _ = strategy.aggregate_train(1, replies)
        heads.append(of_record(arrays)[0])
    assert_allclose(heads[0], heads[1], atol=1e-7, rtol=0)


def test_discriminant_analysis_is_the_pooled_one_too(client_grid):
    def head(sums):
        return discriminant(sums, best_shrinkage(sums))

    arrays = play(strategy_of(head="lda"), client_grid(3, IID), 1, start(MODEL))
    assert_head(arrays, pooled(IID, 3, head), tolerance=1e-3)  # weights of about 100


def test_only_sums_travel_and_a_projection_makes_them_small(client_grid):
    grid = client_grid(2, IID)
    arrays = play(strategy_of(projection=96), grid, 1, start(MODEL))
    assert not any(message.content.array_records for message in grid.pushed)
    model = create_model(NARROW, SPEC)
    model.load_state_dict({k: torch.tensor(v) for k, v in as_arrays(arrays).items()})
    test = load_dataset("digits").test.to_samples(SPEC)
    with torch.inference_mode():
        right = model.eval()(test.inputs).argmax(1) == test.labels
    assert right.float().mean() > 0.85


def test_a_late_node_adds_its_sums_and_the_others_are_not_asked_again(client_grid):
    grid, strategy = client_grid(3, IID), strategy_of()
    late = grid.nodes.pop(FIRST + 2)
    arrays = play(strategy, grid, 1, start(MODEL))
    assert_head(arrays, pooled(IID, 3, places=(0, 1)))
    grid.nodes[FIRST + 2] = late
    grid.pushed.clear()
    arrays = play(strategy, grid, 2, arrays)
    assert [message.metadata.dst_node_id for message in grid.pushed] == [FIRST + 2]
    assert_head(arrays, pooled(IID, 3))
    again = play(strategy, grid, 3, arrays)  # nobody is asked, and the head stays
    assert_head(again, pooled(IID, 3))


def test_a_node_that_is_back_under_another_id_counts_once(client_grid):
    """A SuperNode without a key file is another node to the SuperLink when it starts again."""
    grid, directory = client_grid(3, IID), Directory(most_samples=0)
    strategy = strategy_of(directory=directory)
    directory.look_up(grid, grid.nodes)
    arrays = play(strategy, grid, 1, start(MODEL))
    grid.nodes[FIRST + 9] = grid.nodes.pop(FIRST + 2)
    directory.look_up(grid, grid.nodes)
    grid.pushed.clear()
    assert_head(play(strategy, grid, 2, arrays), pooled(IID, 3))
    assert not grid.pushed


def test_a_node_taken_back_leaves_the_head_of_the_others(client_grid):
    grid, strategy = client_grid(3, IID), strategy_of()
    arrays = play(strategy, grid, 1, start(MODEL))
    other = strategy_of()
    other.load_state_dict(strategy.state_dict())  # as from a checkpoint
    names = [strategy.names[FIRST + place] for place in range(3)]
    arrays = other.forget(names[1:2], arrays)
    assert_head(arrays, pooled(IID, 3, places=(0, 2)))
    with pytest.raises(ValueError, match="not among the nodes that sent sums"):
        other.forget(names[1:2], arrays)
    with pytest.raises(ValueError, match="no other node"):
        other.forget([names[0], names[2]], arrays)


def test_a_nodes_own_head_is_that_of_its_samples_counted_more_often(client_grid, tmp_path):
    config = {**SKEWS["dirichlet 0.01"][0], "train.holdout": 0.2}
    grid, strategy = client_grid(3, config), strategy_of(personal=4.0, fraction_evaluate=1.0)
    arrays = play(strategy, grid, 1, start(MODEL))
    messages = strategy.configure_evaluate(1, arrays, ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    assert {reply.metadata.message_type for reply in replies} == {EVALUATE_OWN}
    total = reduce(add, map(sums_of, strategy.sums.values()))
    by_node = {reply.metadata.src_node_id: reply for reply in replies}
    for session in sessions(config, tmp_path, 3):
        node = FIRST + session.identity
        reply = by_node[node]
        more = total + sums_of(strategy.sums[node]).times(4.0)
        with torch.inference_mode():
            shown = MODEL.features(session.data.holdout.inputs).half().double().numpy()
        labels = session.data.holdout.labels.numpy()
        losses = {}
        for key, sums in (("eval-accuracy", more), ("shared-accuracy", total)):
            head = ridge(sums, best_penalty(total))
            logits = shown @ head.weight.T + head.bias
            right = (logits.argmax(1) == labels).mean()
            assert reply.content["metrics"][key] == pytest.approx(right, abs=1.5 / len(labels))
            losses[key] = log_loss(labels, softmax(logits, axis=1), labels=range(10))
        assert losses["eval-accuracy"] != pytest.approx(losses["shared-accuracy"], rel=1e-3)
        loss = reply.content["metrics"]["eval-loss"]
        assert loss == pytest.approx(losses["eval-accuracy"], rel=1e-3)
    own, shared = (
        np.mean([reply.content["metrics"][key] for reply in replies])
        for key in ("eval-accuracy", "shared-accuracy")
    )
    assert own >= shared


def masked(grid, config):
    """The grid of a run with secure sums, whose nodes are those of `grid`."""
    method = find_method("analytic")
    return screening_grid(
        grid,
        deadline=60.0,
        norm_threshold=0.0,
        phases=phases_of(method, secure_sums=True),
        model=as_arrays(start(MODEL)),
        summed={
            "summed": method.summed,
            "longest": 0.01,  # sums are not shortened
            "run_id": 1,  # as the nodes'
            "run_config": config,
        },
    )


SECURE = {"strategy": "analytic", "secure-sums": True}


@pytest.mark.parametrize(("config", "nodes"), SKEWS.values(), ids=list(SKEWS))
def test_under_masks_the_head_is_the_pooled_one_too(client_grid, config, nodes):
    config, strategy = {**config, **SECURE}, strategy_of(secure_sums=True)
    grid = client_grid(nodes, config)
    sent = []
    for node, answer in [*grid.nodes.items()]:
        grid.nodes[node] = lambda message, answer=answer: sent.append(answer(message)) or sent[-1]
    arrays = play(strategy, masked(grid, config), 1, start(MODEL))
    assert_head(arrays, pooled(config, nodes))
    assert not any(SUMS in content for content in sent)
    assert len(strategy.names) == nodes


def test_a_node_cannot_be_taken_out_of_a_secure_sum(client_grid):
    config, strategy = {**IID, **SECURE}, strategy_of(secure_sums=True)
    arrays = play(strategy, masked(client_grid(4, config), config), 1, start(MODEL))
    before = strategy.state_dict()
    with pytest.raises(ValueError, match="came in a secure sum"):
        strategy.forget([strategy.names[FIRST + 1]], arrays)
    assert strategy.state_dict()["names"] == before["names"]


def test_a_secure_sum_that_no_samples_have_changes_nothing(client_grid, monkeypatch):
    def negative(sums, *others):
        return means_of(Sums(-sums.gram, sums.by_class, sums.counts), *others)

    monkeypatch.setattr("flwr_distill.strategies.analytic.client.means_of", negative)
    config, strategy = {**IID, **SECURE}, strategy_of(secure_sums=True)
    arrays = play(strategy, masked(client_grid(3, config), config), 1, start(MODEL))
    assert not strategy.sums
    assert_allclose(of_record(arrays)[0], of_record(start(MODEL))[0])


def test_late_nodes_add_a_secure_sum_of_their_own(client_grid):
    config, strategy = {**IID, **SECURE}, strategy_of(secure_sums=True)
    grid = client_grid(6, config)
    late = {node: grid.nodes.pop(node) for node in range(FIRST + 3, FIRST + 6)}
    secure = masked(grid, config)
    arrays = play(strategy, secure, 1, start(MODEL))
    assert_head(arrays, pooled(config, 6, places=(0, 1, 2)))
    grid.nodes |= late
    arrays = play(strategy, secure, 2, arrays)
    assert_head(arrays, pooled(config, 6))


def test_under_masks_each_node_adds_its_noise(client_grid):
    config = {**IID, **SECURE, "train.dp-noise": 0.5, "train.dp-delta": 1e-5}
    strategy = strategy_of(noise=0.5, secure_sums=True)
    play(strategy, masked(client_grid(3, config), config), 1, start(MODEL))
    (noisy,) = map(sums_of, strategy.sums.values())
    (exact,) = [reduce(add, [Sums.of(x, y, 10) for x, y in samples_of(config, 3)])]
    of_gram, of_classes, _ = deviations(1.0, 0.5)
    assert np.diag(noisy.gram - exact.gram).std() == pytest.approx(of_gram * 3**0.5, rel=0.4)
    assert (noisy.by_class - exact.by_class).std() == pytest.approx(of_classes * 3**0.5, rel=0.2)


def padded(array, *more):
    """With so many zeros more along each axis."""
    return np.pad(array, [(0, n) for n in more] + [(0, 0)] * (array.ndim - len(more)))


def wider(upper):
    """The upper triangle of a matrix with another row and column of zeros."""
    square = np.zeros((WIDTH + 1, WIDTH + 1), upper.dtype)
    square[np.triu_indices(WIDTH)] = upper
    return square[np.triu_indices(WIDTH + 1)]


def spoiled(**changed):
    """Change arrays of a reply's sums."""

    def change(record):
        arrays = as_arrays(record)
        return as_record(arrays | {n.replace("_", "-"): f(arrays) for n, f in changed.items()})

    return change


@pytest.mark.parametrize(
    "change",
    [
        spoiled(gram=lambda a: -a[GRAM]),
        spoiled(unit=lambda a: 1e6 * a[UNIT]),
        spoiled(gram=lambda a: 0 * a[GRAM]),
        spoiled(counts=lambda a: 1e6 * a[COUNTS] + 0.5),
        spoiled(by_class=lambda a: 50 * a[BY_CLASS]),
        spoiled(by_class=lambda a: a[BY_CLASS][:4], counts=lambda a: a[COUNTS][:4]),
        spoiled(by_class=lambda a: padded(a[BY_CLASS], 1), counts=lambda a: padded(a[COUNTS], 1)),
        spoiled(by_class=lambda a: padded(a[BY_CLASS], 0, 1), gram=lambda a: wider(a[GRAM])),
    ],
)
def test_sums_that_no_samples_have_are_set_aside(client_grid, change):
    grid, strategy = client_grid(3, IID), strategy_of()
    spoil(grid, FIRST + 1, lambda content: content.update({SUMS: change(content[SUMS])}))
    arrays = play(strategy, grid, 1, start(MODEL))
    assert_head(arrays, pooled(IID, 3, places=(0, 2)))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[SUMS].pop(UNIT),
        lambda content: content[SUMS].pop(GRAM),
        lambda content: content.pop(SUMS),
        lambda content: content.clear(),
    ],
)
def test_in_a_users_own_app_a_malformed_reply_is_neither_all_nodes_sums_nor_the_end(
    client_grid, change
):
    """One without a unit passed for a secure sum, so that it alone made the head."""
    grid, strategy = client_grid(3, IID), strategy_of()
    spoil(grid, FIRST, change)
    arrays = play(strategy, grid, 1, start(MODEL))
    assert strategy.sums.keys() == {FIRST + 1, FIRST + 2}
    assert_head(arrays, pooled(IID, 3, places=(1, 2)))


def test_samples_that_a_node_has_beyond_what_counts_are_scaled_down(client_grid):
    directory = Directory(most_samples=10.0)
    directory.num_examples = dict(zip(range(FIRST, FIRST + 3), (479, 479, 100), strict=True))
    strategy = strategy_of(directory=directory)
    play(strategy, client_grid(3, IID), 1, start(MODEL))
    counting = {node: round(float(sums[COUNTS].sum())) for node, sums in strategy.sums.items()}
    assert counting == directory.num_examples


def test_features_are_computed_once(client_grid, monkeypatch):
    sizes = []

    def counted(model, inputs, device):
        sizes.append(len(inputs))
        return compute(model, inputs, device)

    compute = features._features
    monkeypatch.setattr(features, "_features", counted)
    play(strategy_of(), client_grid(2, IID), 1, start(MODEL))
    assert sum(sizes) == len(load_dataset("digits").train)
    sizes.clear()
    arrays = play(strategy_of(), client_grid(2, IID), 1, start(MODEL))
    assert sizes == 2 * [features.PROBED]
    assert_head(arrays, pooled(IID, 2))


def test_noisy_sums_are_booked_and_a_node_whose_budget_is_spent_sends_none(client_grid):
    config = {**IID, "train.dp-noise": 8.0, "train.dp-delta": 1e-5, "train.dp-epsilon": 1.0}
    grid, strategy = client_grid(2, config), strategy_of(noise=8.0)
    message, *_ = strategy.configure_train(1, start(MODEL), ConfigRecord(), grid)
    (reply,) = grid.send_and_receive([message])
    metrics = reply.content["metrics"]
    assert 0 < metrics["dp-epsilon"] < 1
    counts = as_arrays(reply.content[SUMS])[COUNTS]
    assert np.abs(counts - counts.round()).max() > 1e-3
    strategy.aggregate_train(1, [reply])
    (sums,) = strategy.sums.values()
    assert np.isfinite(sums[BY_CLASS]).all()
    for _ in range(4):
        (reply,) = grid.send_and_receive([message])
    assert "this node has spent" in reply.error.reason


def with_noise(client_grid, num_nodes=2, noise=4.0):
    """A strategy for noisy sums, and the replies of its nodes."""
    grid = client_grid(num_nodes, {**IID, "train.dp-noise": noise})
    strategy = strategy_of(noise=noise)
    asked = strategy.configure_train(1, start(MODEL), ConfigRecord(), grid)
    return strategy, grid.send_and_receive(asked)


def test_the_penalty_of_noisy_sums_is_that_of_the_noise_and_not_of_what_it_hides(client_grid):
    strategy, replies = with_noise(client_grid)
    arrays, _ = strategy.aggregate_train(1, replies)
    total = reduce(add, (sums_of(as_arrays(reply.content[SUMS])) for reply in replies))
    of_gram, _, _ = deviations(1.0, 4.0)
    assert_head(arrays, ridge(total, noisy_penalty(WIDTH, of_gram * np.sqrt(2))), 1e-6)


def test_noisy_sums_that_are_too_large_for_the_samples_are_set_aside(client_grid):
    strategy, replies = with_noise(client_grid, 3)
    bad = replies[1].metadata.src_node_id
    larger = spoiled(by_class=lambda a: 1000 * a[BY_CLASS])(replies[1].content[SUMS])
    replies[1].content[SUMS] = larger
    strategy.aggregate_train(1, replies)
    assert strategy.sums.keys() == {FIRST, FIRST + 1, FIRST + 2} - {bad}


@pytest.mark.parametrize(
    "change",
    [
        spoiled(gram=lambda a: a[GRAM].astype(np.float32)),
        spoiled(gram=lambda a: a[GRAM][1:]),
        spoiled(unit=lambda a: np.array([np.nan])),
        spoiled(unit=lambda a: np.array([np.inf])),
        spoiled(by_class=lambda a: np.full_like(a[BY_CLASS], np.nan)),
        spoiled(by_class=lambda a: a[BY_CLASS].ravel()),
        spoiled(counts=lambda a: np.full(10, 1e300)),
        spoiled(counts=lambda a: a[COUNTS][:4]),
        spoiled(more=lambda a: a[COUNTS]),
    ],
)
def test_a_record_of_another_form_is_refused_when_it_arrives(client_grid, change):
    grid, strategy = client_grid(2, IID), strategy_of()
    asked = strategy.configure_train(1, start(MODEL), ConfigRecord(), grid)
    (reply, _) = grid.send_and_receive(asked)
    (allowed,) = phases_of(find_method("analytic"))[TRAIN_SUMS].replies
    allowed.check(reply.content, {})
    reply.content[SUMS] = change(reply.content[SUMS])
    with pytest.raises(ValueError, match=r"its (sums|gram|by-class|counts) |NaN or infinity"):
        allowed.check(reply.content, {})


def test_the_sums_of_d_features_are_two_bytes_for_each_pair(client_grid):
    for width, settings in ((WIDTH, {}), (64, {"projection": 64})):
        strategy = strategy_of(**settings)
        play(strategy, client_grid(2, IID), 1, start(MODEL))
        for sums in strategy.sums.values():
            size = sum(array.nbytes for array in sums.values())
            assert size == 2 * width * (width + 1) + 8 * (10 * (width + 1) + 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"projection": 129}, "the model has 128 features"),
        ({"head": "lda", "regularisation": 2.0}, "lda takes 1 at most"),
        ({"model": torch.nn.Linear(4, 3, bias=False)}, "has no bias"),
    ],
)
def test_settings_that_give_no_head_are_refused(settings, said):
    with pytest.raises(SettingsError, match=said):
        Analytic(**{"model": MODEL, **settings})
