"""What a hostile server could read out of a node under a strict policy, and what it gets now."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from flwr_distill.client.app import app
from flwr_distill.client.secure_sums import SumRefusedError
from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.policy import HOSPITAL, OPEN, Policy
from flwr_distill.protocol.arrays import as_record
from flwr_distill.strategies.feddm.method import DISTILL_AROUND
from flwr_distill.strategies.hfldd.method import LABEL_KNOWLEDGE
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import create_model
from flwr_distill_baselines.fedseq_zaccone.method import REPORT_CONFIDENCE

from . import site as site_module
from .site import (
    HFLDD,
    LIFT,
    PRIVATE,
    SPEC,
    Site,
    account,
    crafted,
    data_of,
    evaluated,
    held_out_places,
    passing,
    refused,
    zeros,
)


def read_image(site: Site) -> tuple[np.ndarray, int]:
    """A held-out image and its label, from the losses of 17 models; there must be one alone."""

    def loss(model: ArrayRecord) -> float:
        return float(evaluated(site, model).content.metric_records["metrics"]["eval-loss"])

    biases = np.arange(10.0)
    label = round(float(np.log(np.exp(biases).sum()) - loss(crafted(biases))))
    pixels = []
    for place in range(16):
        share = math.exp(-loss(crafted(place=place, label=label)))
        value = math.log(9 * share / (1 - share)) - LIFT
        pixels.append(round((value + 1) / 2 * 255))
    return np.array(pixels).reshape(1, 4, 4), label


def test_evaluations_do_not_give_a_held_out_image_away(tmp_path: Path) -> None:
    """The run had one sample held out, and 17 models read it from the losses, at epsilon 0."""
    site = Site(tmp_path, HOSPITAL)
    site.run(**PRIVATE, train__holdout=1 / 299, seed=11)
    assert refused(evaluated(site, crafted()), "fewest-held-out")
    with pytest.raises((KeyError, ValueError)):
        read_image(site)


def test_the_attack_by_evaluations_works_where_the_owner_lets_runs_choose(tmp_path: Path) -> None:
    """So that the test above is of a real attack; `hospital` without its keys is the old one."""
    old = {"holdout": None, "evaluation_epsilon": None, "fewest_held_out": 1}
    site = Site(tmp_path, HOSPITAL.model_copy(update={**old, "most_evaluations": None}))
    site.run(**PRIVATE, train__holdout=1 / 299, seed=11)
    image, label = read_image(site)
    (place,) = np.flatnonzero((site.images == image).all((1, 2, 3)))
    assert site.labels[place] == label


def test_a_site_tells_one_rounded_rate_with_noise_that_its_account_books(tmp_path: Path) -> None:
    """With samples enough: no loss, no exact rate, no more evaluations than the owner allows."""
    site = Site(tmp_path, HOSPITAL, number=1500)
    site.run(**PRIVATE)
    exact = (site.labels[held_out_places(site)] == 9).mean()
    rates = []
    most = HOSPITAL.most_evaluations
    assert most
    for number in range(1, most + 1):
        (answer,) = evaluated(site, crafted(np.eye(10)[9])).content.values()
        assert set(answer) == {"num-examples", "eval-accuracy"}
        rates.append(float(answer["eval-accuracy"]))
        assert rates[-1] == round(rates[-1], 2)
        assert account(site) == pytest.approx(0.1 * number)
    assert len(set(rates)) > 5, "the same question has different answers"
    deviation = math.sqrt(2) / 0.1 / answer["num-examples"]
    assert abs(np.mean(rates) - exact) < 5 * deviation / math.sqrt(most) + 0.02
    assert refused(evaluated(site, crafted()), "most-evaluations")
    booked = [line for line in entries(site.state_dir / FOLDER) if line["type"] == "evaluate"]
    assert [line["lifetime"] for line in booked[:2]] == pytest.approx([0.1, 0.2])


def test_no_setting_of_a_run_changes_which_samples_are_held_out(tmp_path: Path) -> None:
    site = Site(tmp_path, HOSPITAL)
    drawn = []
    for settings in ({}, {"seed": 5}, {"train__holdout": 0.5}, {"private__num_classes": 12}):
        site.run(**PRIVATE, **settings)
        drawn.append(held_out_places(site))
    assert drawn[0]
    assert drawn == drawn[:1] * 4
    other = Site(tmp_path / "other", HOSPITAL)
    other.run(**PRIVATE)
    assert held_out_places(other) != drawn[0], "another node has another secret"


def test_one_sample_less_of_a_class_takes_no_other_away(tmp_path: Path) -> None:
    """A count did: of 20 images of a class all were used, and of 19 none."""
    used = []
    for number in (200, 199):  # the last one is of class 9
        site = Site(tmp_path / str(number), HOSPITAL, number=number)
        site.run(**PRIVATE)
        data = data_of(site)
        used.append(len(data.train) + len(data.holdout))
        assert site.guard._max_classes() == 10
    assert used == [200, 199]


def soft_labels_of(site: Site, seed: int, auxiliary: str, number: int) -> Message:
    """Ask for soft labels of a network that nobody trains, so that the server knows it."""
    site.run(**HFLDD, seed=seed, train__holdout=0.1)
    request = {"auxiliary": auxiliary, "auxiliary-size": number, "initial-lr": 1e-30}
    config = ConfigRecord({**request, "initial-steps": 1, "initial-batch-size": 1})
    return site.ask(LABEL_KNOWLEDGE, RecordDict({"config": config}))


def read_all_images(site: Site, auxiliary: str, number: int, runs: int) -> np.ndarray:
    """All images in a file of the node's, from the soft labels of known networks for them."""
    networks, answers = [], []
    for seed in range(runs):
        answer = soft_labels_of(site, seed, auxiliary, number)
        labels = answer.content.array_records["arrays"]["soft-labels"].numpy()
        order = np.random.default_rng(seed).choice(number, number, replace=False)
        answers.append(labels[np.argsort(order)])
        networks.append(create_model("digits-cnn", SPEC, seed=seed).eval().requires_grad_(False))
    weights, _ = torch.func.stack_module_state(networks)
    target = torch.tensor(np.stack(answers)).log()

    def predicted(x: torch.Tensor) -> torch.Tensor:
        def of_one(state: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(networks[0], state, (x,)).log_softmax(1)

        return torch.vmap(of_one)(weights)

    x = torch.zeros(number, 1, 4, 4, requires_grad=True)
    never = {"tolerance_change": 0, "tolerance_grad": 0}
    optimizer = torch.optim.LBFGS([x], max_iter=600, line_search_fn="strong_wolfe", **never)

    def error() -> torch.Tensor:
        optimizer.zero_grad()
        difference = ((predicted(x) - target) * 1e3).square().sum()
        difference.backward()
        return difference

    optimizer.step(error)
    return ((x.detach().numpy() + 1) / 2 * 255).round()


def test_auxiliary_may_not_name_a_path_on_the_node(tmp_path: Path) -> None:
    """The node's own file was an auxiliary set, and 16 runs gave all of its images away."""
    site = Site(tmp_path, HOSPITAL)
    for path in (str(site.file), "images.npz", "../images.npz", "~/images.npz"):
        assert refused(soft_labels_of(site, 0, path, 20), "paths")


def test_what_the_owner_has_named_is_an_auxiliary_set(tmp_path: Path) -> None:
    public = tmp_path / "public.npz"
    np.savez(public, images=np.zeros((30, 4, 4), np.uint8), labels=np.zeros(30, np.int64))
    site = Site(tmp_path, HOSPITAL, files={"public": public})
    answer = soft_labels_of(site, 0, "@public", 20)
    assert answer.content.array_records["arrays"]["soft-labels"].shape == (20, 10)
    with pytest.raises(SettingsError, match="no file called @other"):
        soft_labels_of(site, 0, "@other", 20)


@pytest.mark.slow
def test_the_attack_by_auxiliary_sets_works_where_runs_may_name_paths(tmp_path: Path) -> None:
    old = {"paths": "any", "settings": "any", "sandbox": "none"}
    site = Site(tmp_path, HOSPITAL.model_copy(update=old))
    np.testing.assert_array_equal(read_all_images(site, str(site.file), 300, 16), site.images)


NEVER = Policy(replies="declared", single_updates="never")


@pytest.mark.parametrize("strategy", ["hfldd", "fedlgd", "analytic", "fedavg"])
def test_no_single_model_leaves_without_masks(strategy: str, tmp_path: Path) -> None:
    """All but `fedavg` sum other messages, and a plain request to train gave one model away."""
    site = Site(tmp_path, NEVER)
    site.run(strategy=strategy, secure_sums=True)
    message = RecordDict({"arrays": crafted(), "config": ConfigRecord({"server-round": 1})})
    if strategy != "fedavg":
        assert refused(site.ask("train", message), "single-updates")
    site = Site(tmp_path / "open", OPEN)
    site.run(strategy=strategy, secure_sums=True)
    with pytest.raises(SumRefusedError, match="masks"):  # by the app, where no policy is
        site.ask("train", message)


@pytest.mark.parametrize("strategy", ["krum", "feddf", "their_pkg:Theirs", "unknown"])
def test_in_a_run_with_secure_sums_a_strategy_without_gets_no_model(
    strategy: str, tmp_path: Path
) -> None:
    """Of these the node knew no sums, and so it sent its model as if there were none."""
    site = Site(tmp_path, OPEN)
    site.run(strategy=strategy, secure_sums=True)
    message = RecordDict({"arrays": crafted(), "config": ConfigRecord({"server-round": 1})})
    with pytest.raises(SumRefusedError, match="masks"):
        site.ask("train", message)
    assert evaluated(site, crafted()).has_content()


def test_no_message_of_another_method_is_a_way_around_the_masks(tmp_path: Path) -> None:
    """Nodes serve the messages of all methods, and one without policy had nothing against it."""
    site = Site(tmp_path, OPEN)
    site.run(strategy="fedavg", secure_sums=True)
    request = ConfigRecord({"per-class": 1, "distill-steps": 1})
    message = RecordDict({"arrays": crafted(), "config": ConfigRecord(), DISTILL_AROUND: request})
    with pytest.raises(SumRefusedError, match="masks"):
        site.ask(DISTILL_AROUND, message)


HUGE = 1e30


def failing_above(place: int, value: float) -> ArrayRecord:
    """A model whose logits overflow for an image with a pixel above a value, from 0 to 255."""
    state = passing()
    state["6.weight"][0, place] = HUGE
    state["6.bias"][0] = -HUGE * (value / 255 * 2 - 1 + LIFT)
    state["8.weight"][0, 0] = HUGE
    return as_record(state)


def test_an_evaluation_that_overflows_is_answered_with_noise_and_booked(tmp_path: Path) -> None:
    """It was refused for its loss: exact answers about held-out pixels, at an epsilon of 0."""
    site = Site(tmp_path, HOSPITAL, number=1500)
    site.run(**PRIVATE)
    largest = site.images[held_out_places(site)].reshape(-1, 16).max(0)[3]
    for number, value in enumerate((largest - 0.5, largest + 0.5), start=1):
        (answer,) = evaluated(site, failing_above(3, value)).content.values()
        assert set(answer) == {"num-examples", "eval-accuracy"}
        assert account(site) == pytest.approx(0.1 * number)


def test_evaluations_that_fail_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, HOSPITAL.model_copy(update={"most_evaluations": 3}), number=1500)
    site.run(**PRIVATE)

    def fail(message: Message, context: Context) -> Message:
        return Message(Error(1, "no memory"), reply_to=message)

    monkeypatch.setattr(site_module, "app", fail)
    for _ in range(3):
        assert "no memory" in str(evaluated(site, failing_above(3, 0)).error.reason)
    assert refused(evaluated(site, failing_above(3, 0)), "most-evaluations")
    assert account(site) == 0.0


def test_evaluations_that_are_refused_are_counted_but_not_those_on_too_few(tmp_path: Path) -> None:
    """Whether the loss is a number, and so refused, was a question that cost nothing."""
    policy = Policy(replies="declared", holdout=0.1, most_evaluations=3)
    site = Site(tmp_path, policy, number=1500)
    site.run(strategy="fedavg")
    for _ in range(3):
        assert refused(evaluated(site, failing_above(3, 0)), "replies")
    assert refused(evaluated(site, failing_above(3, 0)), "most-evaluations")
    site = Site(tmp_path / "few", policy.model_copy(update={"fewest_held_out": 1000}))
    site.run(strategy="fedavg")
    for _ in range(4):
        assert refused(evaluated(site, crafted()), "fewest-held-out")


def trained(site: Site, **settings: float) -> Message:
    request = {"server-round": 1, "dp-noise": 1.0, "dp-delta": 1e-5, "local-epochs": 1}
    config = ConfigRecord({**request, "batch-size": 300, **settings})
    return site.ask("train", RecordDict({"arrays": overflowing(), "config": config}))


def test_predictions_that_leave_as_a_metric_say_what_they_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that asked for nothing else cost up to `train.dp-epsilon`, and its account said 0."""
    site = Site(tmp_path, Policy(replies="declared", least_noise=1.0, most_epsilon=5.0))
    site.run(strategy="fedseq-zaccone", train__dp_noise=1.0)

    def report() -> Message:
        asked = {"pretraining-epochs": 1, "auxiliary": "noise", "auxiliary-size": 10}
        return site.ask(REPORT_CONFIDENCE, RecordDict({"config": ConfigRecord(asked)}))

    metrics = report().content.metric_records["metrics"]
    assert account(site) == metrics["dp-epsilon"] > 1

    def silent(message: Message, context: Context) -> Message:
        reply = app(message, context)
        del reply.content.metric_records["metrics"]["dp-epsilon"]
        return reply

    monkeypatch.setattr(site_module, "app", silent)
    assert refused(report(), "most-epsilon")


def overflowing() -> ArrayRecord:
    """A model with weights at the end of floats: it depends on the noisy gradient who passes it."""
    state = zeros()
    state["8.bias"][:] = np.finfo(np.float32).max
    return as_record(state)


def test_a_reply_that_is_refused_for_a_number_that_overflows_costs_its_epsilon(
    tmp_path: Path,
) -> None:
    """Each run asked one question of the noisy gradients, and the account stayed at 0."""
    site = Site(tmp_path, HOSPITAL)
    site.run(**PRIVATE)
    assert refused(trained(site, lr=1e38), "replies")
    assert account(site) > 1


def test_what_exceeds_the_account_is_refused_for_that_whatever_the_reply_holds(
    tmp_path: Path,
) -> None:
    """Two refusals that cost nothing, and tell which of the two it was, were any number of bits."""
    site = Site(tmp_path, HOSPITAL.model_copy(update={"most_epsilon": 1.0}))
    site.run(**PRIVATE)
    for lr in (1e38, 1e-3):
        assert refused(trained(site, lr=lr), "most-epsilon")
    assert account(site) == pytest.approx(0.0)
