"""FedHEAD's models: small residual networks, a bidirectional LSTM for text, an MLP for flows."""

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
    """Bidirectional LSTM over words, for AG News and SST-2."""
    return BiLSTM(spec)


@register("mlp", fits=lambda spec: spec.kind != "text")
def mlp(spec: DataSpec) -> nn.Module:
    """Four hidden layers of 200 with ReLU, FedHEAD's network for traffic flows."""
    return nn.Sequential(*dense(math.prod(spec.shape), 200, 200, 200, 200, spec.num_classes))
