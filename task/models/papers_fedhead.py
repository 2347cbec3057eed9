"""FedHEAD's models: small residual networks, bidirectional LSTMs for text, an MLP for flows."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.models.papers import dense
from flwr_distill.task.models.registry import register


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut without parameters.

    With stride 2 the shortcut takes every second pixel and pads the new channels with zeros (He et
    al. 2016, option A).
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.stride = stride
        self.new_channels = width - before

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, before, H, W) to (n, width, H / stride, W / stride), rounded up."""
        inner = functional.relu(self.first_norm(self.first(x)))
        inner = self.second_norm(self.second(inner))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        shortcut = functional.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return functional.relu(inner + shortcut)


def _residual_network(spec: DataSpec, blocks: int) -> nn.Module:
    """6n + 2 layers: a 3x3 stem, three stages of n blocks (16, 32, 64 channels), one dense."""
    layers: list[nn.Module] = [
        nn.Conv2d(spec.shape[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    before = 16
    for width in (16, 32, 64):
        for block in range(blocks):
            halves = block == 0 and width > 16
            layers.append(ResidualBlock(before, width, stride=2 if halves else 1))
            before = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, spec.num_classes))
    return nn.Sequential(*layers, *head)


@register("resnet8", fits=lambda spec: spec.kind == "image")
def resnet8(spec: DataSpec) -> nn.Module:
    """ResNet-8 for small images (He et al. 2016, n = 1); 75,290 parameters on CIFAR-10."""
    return _residual_network(spec, blocks=1)


@register("resnet32", fits=lambda spec: spec.kind == "image")
def resnet32(spec: DataSpec) -> nn.Module:
    """ResNet-32 for small images (He et al. 2016, n = 5); 464,154 parameters on CIFAR-10."""
    return _residual_network(spec, blocks=5)


class BiLSTM(nn.Module):
    """Embedding (100), bidirectional LSTM (128; our sizes), mean over words, one dense layer."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocabulary, 100, padding_idx=0)
        self.lstm = nn.LSTM(100, 128, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(2 * 128, spec.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map token ids, float (n, 1, 1, length), to logits (n, classes)."""
        tokens = torch.flatten(inputs, 1).long()
        words = (tokens > 0).sum(dim=1).clamp(min=1)
        on_cpu = tokens.device.type == "cpu"
        sum_of_states = self._sum_of_packed if on_cpu else self._sum_without_waiting
        logits: Tensor = self.dense(sum_of_states(self.embedding(tokens), words) / words[:, None])
        return logits

    def _sum_of_packed(self, embedded: Tensor, words: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, words, batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return states.sum(dim=1)

    def _sum_without_waiting(self, embedded: Tensor, words: Tensor) -> Tensor:
        """Give the same sum without packing, which needs the lengths on the CPU: a GPU would wait.

        Padding at the end does not change the forward states, padding in front not the backward
        ones. So each text is run twice, padded once for each direction.
        """
        count, length, _ = embedded.shape
        places = torch.arange(length, device=words.device)
        moved = (places + words[:, None]) % length
        padded_in_front = embedded.gather(1, moved[:, :, None].expand_as(embedded))
        states, _ = self.lstm(torch.cat([embedded, padded_in_front]))
        forward, backward = states.chunk(2, dim=2)
        at_the_end = (places < words[:, None]).to(states.dtype)
        in_front = (places >= length - words[:, None]).to(states.dtype)
        sums = [
            torch.einsum("nt,nth->nh", at_the_end, forward[:count]),
            torch.einsum("nt,nth->nh", in_front, backward[count:]),
        ]
        return torch.cat(sums, dim=1)


@register("bilstm", fits=lambda spec: spec.kind == "text")
def bilstm(spec: DataSpec) -> nn.Module:
    """Small bidirectional LSTM over words; FedHEAD's is ``fedhead-bilstm``."""
    return BiLSTM(spec)


class BothDirections(nn.Module):
    """A bidirectional LSTM whose states do not depend on the padding at a text's end.

    It needs no lengths on the CPU, unlike packed sequences: a GPU would wait for them.
    """

    def __init__(self, inputs: int, states: int) -> None:
        super().__init__()
        self.forwards = nn.LSTM(inputs, states, batch_first=True)
        self.backwards = nn.LSTM(inputs, states, batch_first=True)

    def forward(self, inputs: Tensor, words: Tensor) -> Tensor:
        """Map (n, length, inputs) to (n, length, 2 states), for texts of (n,) words."""
        behind = self.backwards(_turned(inputs, words))[0]
        return torch.cat([self.forwards(inputs)[0], _turned(behind, words)], dim=2)


def _turned(states: Tensor, words: Tensor) -> Tensor:
    """The words of each text in reverse order; what follows them is padding still."""
    count, length, width = states.shape
    places = torch.arange(length, device=words.device)
    reverse = (words[:, None] - 1 - places) % length
    return states.gather(1, reverse[:, :, None].expand(count, length, width))


class PaperBiLSTM(nn.Module):
    """FedHEAD's network for texts, a `fedhead_bilstm`."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(spec.vocabulary, 32, padding_idx=0)
        self.first = BothDirections(32, 128)
        self.second = BothDirections(2 * 128, 64)
        self.dense = nn.Sequential(*dense(2 * 64, 1024, 512, 256, 128, 64, spec.num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map token ids, float (n, 1, 1, length), to logits (n, classes)."""
        tokens = torch.flatten(inputs, 1).long()
        words = (tokens > 0).sum(dim=1).clamp(min=1)
        if tokens.device.type == "cpu":
            tokens = tokens[:, : int(words.max())]
        states = self.second(self.first(self.embedding(tokens), words), words)
        is_word = torch.arange(tokens.shape[1], device=words.device) < words[:, None]
        largest = states.masked_fill(~is_word[:, :, None], -math.inf).amax(dim=1)
        logits: Tensor = self.dense(largest)
        return logits


@register("fedhead-bilstm", fits=lambda spec: spec.kind == "text")
def fedhead_bilstm(spec: DataSpec) -> nn.Module:
    """FedHEAD's bidirectional LSTM for AG News and SST-2.

    Embedding; two bidirectional layers of 128 and 64; the largest state over words; dense layers of
    1024, 512, 256, 128 and 64 with ReLU, and one to the classes. The paper does not state the
    embedding's width; 32 is the published code's. Without the embedding 1,160,388 parameters with
    four classes.
    """
    return PaperBiLSTM(spec)


@register("mlp", fits=lambda spec: spec.kind != "text")
def mlp(spec: DataSpec) -> nn.Module:
    """Four hidden layers of 200 with ReLU, FedHEAD's network for network traffic."""
    return nn.Sequential(*dense(math.prod(spec.shape), 200, 200, 200, 200, spec.num_classes))
