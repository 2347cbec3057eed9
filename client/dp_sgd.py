"""Differential privacy on a node: DP-SGD by Opacus, and the privacy budget."""

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from flwr_distill.client.class_weights import mean_loss
from flwr_distill.client.session import Session
from flwr_distill.client.terms import LossTerm, title_of, value_of
from flwr_distill.protocol.schema import MAX_NUMBER
from flwr_distill.storage.store import SPENT, NodeStore
from flwr_distill.task.augmentation import Augment, augmented
from flwr_distill.task.compute.opacus_import import root_logger_unchanged
from flwr_distill.task.datasets import Samples
from flwr_distill.task.errors import ReportedError, SettingsError
from flwr_distill.task.models import why_not_private
from flwr_distill.task.settings import Change, TrainSettings

if TYPE_CHECKING:  # importing Opacus takes a second
    from opacus.accountants import RDPAccountant

STATE_WORDS = slice(3, 627)
"""The 624 words of the Mersenne Twister in the state of torch's CPU generator."""


class BudgetSpentError(ReportedError, RuntimeError):
    """More steps would exceed ``train.dp-epsilon``."""


@dataclass(frozen=True)
class PrivacyAccount:
    """The epsilon that a node has spent, stored on the node; it never falls.

    Parameters
    ----------
    store : NodeStore
        Of the first run in a chain of resumed ones, because a resumed run does not refund epsilon.
    budget : float
        Highest epsilon at `delta`; 0 sets no limit.
    """

    store: NodeStore
    delta: float
    budget: float

    @classmethod
    def of(cls, session: Session, settings: TrainSettings) -> Self:
        """The account of a node."""
        return cls(session.store.origin, settings.dp_delta, settings.dp_epsilon)

    @property
    def epsilon(self) -> float:
        """Epsilon spent, by the accountant of Rényi differential privacy."""
        return float(self._accountant().get_epsilon(self.delta))

    def epsilon_of_group(self, size: int) -> float:
        """Epsilon of so many samples together; of all, that of the node as a whole.

        They move a sum `size` times as far as one sample does. Rényi divergences of the Gaussian
        mechanism grow with the square of that and add up (Mironov 2017, proposition 7 and 1), and
        proposition 3 turns them into epsilon. What sampling hides is not counted.
        """
        history = self._accountant().history
        cost = size * size * sum(steps / (2 * noise * noise) for noise, _, steps in history)
        return float(cost + 2 * math.sqrt(cost * -math.log(self.delta)))

    def numbers(self, samples: int) -> dict[str, float]:
        """Epsilon of a sample and of all samples of the node, and delta, as metrics of a reply."""
        return {
            "dp-epsilon": self.epsilon,
            "dp-epsilon-of-all": min(self.epsilon_of_group(samples), MAX_NUMBER),
            "dp-delta": self.delta,
        }

    def spend(self, noise: float, rate: float, steps: int) -> None:
        """Book steps of the sampled Gaussian mechanism, before they are taken.

        `rate` is the probability of each sample to be in a step. If the steps would exceed the
        budget, nothing is booked, and a BudgetSpentError says so.
        """
        accountant = self._accountant()
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
        if self.budget and (epsilon := accountant.get_epsilon(self.delta)) > self.budget:
            raise BudgetSpentError(
                f"this node has spent {self.epsilon:.3g}, {steps} more steps would make it "
                f"{epsilon:.3g}; it takes no further part",
                where="train.dp-epsilon",
                value=self.budget,
            )
        self.store.write(SPENT, json.dumps(accountant.state_dict()).encode())

    def _accountant(self) -> "RDPAccountant":
        with root_logger_unchanged():
            from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        if (state := self.store.read(SPENT)) is not None:
            accountant.load_state_dict(json.loads(state))
        return accountant


@dataclass(frozen=True)
class PrivateTraining:
    """DP-SGD (Abadi et al. 2016): steps on Poisson samples, with clipped gradients and noise.

    Parameters
    ----------
    noise : float
        Noise multiplier, > 0: standard deviation of the noise on a sum of gradients, in units of
        `clip`.
    clip : float
        Norm to which the gradient of each sample is clipped.
    account : PrivacyAccount
        Where steps are booked.
    generator : torch.Generator
        Of samples, their changes and noise, on the CPU. Its state must stay secret: it reveals the
        noise, and the changes, which would differ for all samples if one was missing.
    """

    noise: float
    clip: float
    account: PrivacyAccount
    generator: torch.Generator

    @classmethod
    def of(cls, session: Session, settings: TrainSettings) -> Self | None:
        """Private training by the settings; None without ``train.dp-noise``."""
        if not settings.dp_noise:
            return None
        account = PrivacyAccount.of(session, settings)
        return cls(settings.dp_noise, settings.dp_clip, account, secret_generator())

    def fit(
        self,
        model: nn.Module,
        samples: Samples,
        optimizer: torch.optim.Optimizer,
        *,
        batch_size: int,
        steps: int,
        changes: tuple[Change, ...] = (),
        terms: Sequence[LossTerm] = (),
        weights: Tensor | None = None,
    ) -> None:
        """Train the model in place, on the cross-entropy and the loss terms.

        Parameters
        ----------
        samples : Samples
            Each is in a step with probability ``1 / ceil(n / batch_size)``.
        batch_size : int
            Upper bound of a step's expected number of samples.
        changes : tuple[str, ...] (default: ())
            Random changes of the images, one draw for each sample of a step.
        weights : Tensor, optional (default: None)
            Of classes in the cross-entropy, by label, before gradients are clipped. They must not
            follow from the samples.

        Raises
        ------
        SettingsError
            If the model or a term has no per-sample gradients.
        BudgetSpentError
            If the steps would exceed the budget.
        """
        with root_logger_unchanged():
            from opacus.grad_sample import GradSampleHooks
            from opacus.optimizers import DPOptimizer
            from opacus.utils.uniform_sampler import UniformWithReplacementSampler

        model.train()
        if reason := why_not_private(model):
            raise SettingsError(reason, where="train.dp-noise", value=self.noise)
        for term in terms:
            require_single_gradients(self.noise, type(term), term.method)
        n, device = len(samples), next(model.parameters()).device
        rate = 1 / math.ceil(n / batch_size)
        self.account.spend(self.noise, rate, steps)
        private = DPOptimizer(
            optimizer,
            noise_multiplier=self.noise,
            max_grad_norm=self.clip,
            expected_batch_size=rate * n,
            generator=_on(device, self.generator),
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        hooks = GradSampleHooks(model)
        with _secret_layers(device):
            for batch in UniformWithReplacementSampler(
                num_samples=n, sample_rate=rate, generator=self.generator, steps=steps
            ):
                indices = torch.tensor(batch, dtype=torch.int64)
                indices = indices.to(samples.labels.device, non_blocking=True)
                inputs, labels = samples.minibatch(indices, device)
                private.zero_grad(set_to_none=True)
                if batch:
                    if changes:
                        numbers = Augment(changes, self.generator).draw(len(batch), device)
                        inputs = augmented(inputs, changes, numbers)
                    logits = model(inputs)
                    loss = mean_loss(logits, labels, weights)
                    loss = _plus(loss, terms, "sample", inputs, labels, logits)
                    loss.backward()  # type: ignore[no-untyped-call]
                    _without_infinite(parameters)
                else:
                    logits = labels
                    for p in parameters:
                        p.grad_sample = p.new_zeros(0, *p.shape)  # type: ignore[attr-defined]
                private.pre_step()  # the noisy mean is now in p.grad
                rest = _plus(
                    torch.zeros((), device=device), terms, "weights", inputs, labels, logits
                )
                if rest.requires_grad:
                    rest.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        hooks.cleanup()


def require_single_gradients(noise: float, term: type[LossTerm], method: str) -> None:
    """Raise SettingsError if a term mixes samples, which then have no gradients of their own."""
    if term.mixes == "minibatch":
        raise SettingsError(
            f"the {title_of(term, method)} mixes the samples of a minibatch, which then have no "
            "gradients of their own",
            where="train.dp-noise",
            value=noise,
            remedy="set it to 0, or the weight of the term",
        )


def require_no_privacy(settings: TrainSettings, what: str) -> None:
    """Raise SettingsError if ``train.dp-noise`` is set: `what` has no differential privacy."""
    if settings.dp_noise:
        raise SettingsError(
            f"{what} has no differential privacy",
            where="train.dp-noise",
            value=settings.dp_noise,
            remedy="set it to 0, or take another strategy",
        )


def secret_generator() -> torch.Generator:
    """CPU generator whose whole state comes from the operating system.

    The server knows the run's seed and could subtract noise that depends on it. `manual_seed` uses
    only 32 bits of a seed, few enough to try them all.
    """
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state()
    words = [secrets.randbits(32) for _ in range(STATE_WORDS.stop - STATE_WORDS.start)]
    state.view(torch.int64)[STATE_WORDS] = torch.tensor(words)
    generator.set_state(state)
    return generator


@contextmanager
def _secret_layers(device: torch.device) -> Iterator[None]:
    """Have dropout draw from the operating system within the block.

    The masks of a minibatch are drawn in the order of its samples. For a server that knows them, a
    missing sample changes the gradients of all others, beyond the clip.
    """
    cuda = [device] if device.type == "cuda" else []
    own = secret_generator()
    with torch.random.fork_rng(devices=cuda):
        torch.set_rng_state(own.get_state())
        for each in cuda:
            torch.cuda.set_rng_state(_on(each, own).get_state(), each)
        yield


def _on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """The generator, or for a GPU one with a seed and an offset from it.

    A GPU's generator takes 64 bits of seed, too few for noise that must not be guessed. The offset
    of its stream is as secret: a multiple of 4 below 2^62, half of its range.
    """
    if device.type == "cpu":
        return generator
    seed, offset = torch.randint(2**60, (2,), generator=generator).tolist()
    own = torch.Generator(device).manual_seed(seed)
    own.set_offset(4 * offset)
    return own


def _without_infinite(parameters: Sequence[nn.Parameter]) -> None:
    """Put zeros in place of the gradients of samples for which one is infinite or not a number.

    They would pass the clip. A server could craft a model whose gradient is infinite for a certain
    sample only, and would learn at no epsilon that it is present.
    """
    gradients = [p.grad_sample for p in parameters]  # type: ignore[attr-defined]
    finite = torch.stack([g.flatten(1).isfinite().all(1) for g in gradients]).all(0)
    for g in gradients:  # in place and always: a check would wait for the GPU
        g.masked_fill_(~finite.view(-1, *[1] * (g.ndim - 1)), 0)


def _plus(
    loss: Tensor,
    terms: Sequence[LossTerm],
    mixes: str,
    inputs: Tensor,
    labels: Tensor,
    logits: Tensor,
) -> Tensor:
    """The loss plus the terms with this `mixes`."""
    for term in terms:
        if term.mixes == mixes:
            loss = loss + value_of(term, inputs, labels, logits)
    return loss
