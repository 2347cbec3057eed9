"""Virtual data under differential privacy, and their place in a node's account."""

from flwr_distill.client.dp_sgd import PrivacyAccount, secret_generator
from flwr_distill.client.session import Session
from flwr_distill.distill.private_matching import check_shape, distill_dm_privately, noise_for
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.task.errors import SettingsError


def distil_privately(
    session: Session, *, epsilon: float, per_class: int, steps: int | None, formation: int
) -> VirtualData:
    """Distil a node's training data under differential privacy, and book the epsilon first.

    `epsilon` is what this release spends, at ``train.dp-delta``; > 0. For the other arguments see
    :func:`distill.private_matching.distill_dm_privately`.

    Raises
    ------
    BudgetSpentError
        If it would exceed ``train.dp-epsilon``.
    DistillError
        If the data cannot be distilled so.
    SettingsError
        With ``train.on="virtual"``: each sample is in all virtual images, of which one is hidden.
    """
    train = session.task.train
    if train.on == "virtual":
        raise SettingsError(
            "dp-epsilon would protect virtual images, not the samples behind them",
            where="train.on",
            value=train.on,
            remedy="set it to real",
        )
    data, noise = session.data, noise_for(epsilon, train.dp_delta)
    check_shape(data.spec.shape, "dp-epsilon", epsilon)  # before it is booked
    PrivacyAccount.of(session, train).spend(noise, rate=1.0, steps=1)
    return distill_dm_privately(
        data.train.inputs,
        data.train.labels,
        num_classes=data.spec.num_classes,
        per_class=per_class,
        pixels=data.spec.pixels,
        steps=steps,
        generator=session.generator("distill"),
        noise_generator=secret_generator(),
        epsilon=epsilon,
        delta=train.dp_delta,
        device=session.device,
        formation=formation,
    )
