"""What PyTorch's operations do on CUDA: where CPU tensors may go, what waits, how many kernels.

From PyTorch's CUDA sources; numbers of kernels are estimates.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

COPIES = {aten.copy_, aten._to_copy, aten._foreach_copy_}
CPU_INDICES = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index,
    aten._unsafe_index_put,
}
"""Take index tensors, and a value of no dimensions, from the CPU."""
CPU_LENGTHS = {
    aten._pack_padded_sequence,
    aten._pack_padded_sequence_backward,
    aten._pad_packed_sequence,
}
"""Take, and give, lengths of sequences on the CPU."""
CPU_SCALARS = {
    aten.fill,
    aten.fill_,
    aten.index_fill,
    aten.index_fill_,
    aten.index_put,
    aten.index_put_,
    aten.lift_fresh,
    aten.masked_fill,
    aten.masked_fill_,
}
"""Take a CPU tensor of no dimensions, as all element-wise operations do."""
WAITS = {
    aten._linalg_check_errors,
    aten._linalg_eigh,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.histc,
    aten.masked_select,
    aten.multinomial,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
NO_KERNEL = {
    aten._reshape_alias,
    aten._unsafe_view,
    aten.alias,
    aten.detach,
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.is_same_size,
    aten.lift_fresh,
    aten.new_empty,
    aten.new_empty_strided,
    aten.resize_,
    aten.squeeze_,
    aten.t_,
    aten.transpose_,
    aten.unsqueeze_,
    aten.view,
}
"""Beside views."""
KERNELS: dict[Any, int] = {
    aten._index_put_impl_: 3,
    aten._unique2: 6,
    aten.affine_grid_generator: 4,
    aten.bincount: 4,
    aten.convolution: 2,
    aten.convolution_backward: 3,
    aten.diagonal_backward: 2,
    aten.embedding_dense_backward: 5,
    aten.grid_sampler_2d_backward: 3,
    aten.index_put: 4,
    aten.index_put_: 3,
    aten.max_pool2d_with_indices_backward: 2,
    aten.multinomial: 4,
    aten.native_batch_norm: 2,
    aten.native_batch_norm_backward: 2,
    aten.native_group_norm: 3,
    aten.native_group_norm_backward: 4,
    aten.nll_loss_backward: 2,
    aten.nonzero: 4,
    aten.select_backward: 2,
    aten.slice_backward: 2,
    aten.sort: 3,
}
"""Kernels of an operation, where that is not one."""
LIST_LIMITS = (110, 64, 48, 36, 30)
"""Tensors that one kernel takes of one, two, ... lists."""
LIST_BLOCK, LIST_BLOCKS = 65536, 320
"""Elements of a block, and blocks of a kernel, of operations on lists."""
TILE = 64
"""Columns of a block of a factorisation."""


def takes_from_cpu(func: Any, args: Sequence[Any], x: Tensor) -> bool:
    """Whether an operation on GPU tensors also takes `x`, which is on the CPU."""
    packet = func.overloadpacket
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if value is x and argument.alias_info is not None and argument.alias_info.is_write:
            return False
    if packet in CPU_INDICES and any(x is index for index in args[1]):
        return True
    if packet in CPU_LENGTHS:
        return True
    element_wise = torch.Tag.pointwise in func.tags or str(packet).startswith("aten._foreach")
    return x.ndim == 0 and (element_wise or packet in CPU_SCALARS)


def copies_from_cpu(packet: Any, args: Sequence[Any], x: Tensor) -> bool:
    """Whether an operation first copies `x`, which is on the CPU, to the GPU."""
    return packet in CPU_INDICES and not (_fills_a_mask(args) and x is args[2])


def waits(packet: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the GPU to know a result or its shape."""
    if packet in CPU_INDICES:
        return any(_is_mask(index) for index in args[1]) and not _fills_a_mask(args)
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    return packet in WAITS


def _fills_a_mask(args: Sequence[Any]) -> bool:
    """Whether this is x[mask] = number, which needs no positions."""
    number = len(args) > 2 and args[2].numel() == 1 and args[2].device.type == "cpu"
    return number and len(args[1]) == 1 and _is_mask(args[1][0])


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def kernels(func: Any, args: Sequence[Any]) -> int:
    """How many kernels an operation starts."""
    packet = func.overloadpacket
    if func.is_view or packet in NO_KERNEL:
        return 0
    if str(packet).startswith(("aten._foreach", "aten._fused")):
        lists = sum(isinstance(a, list | tuple) for a in args)
        limit = LIST_LIMITS[min(lists, len(LIST_LIMITS)) - 1]
        blocks: int = sum(math.ceil(x.numel() / LIST_BLOCK) for x in args[0])
        return max(math.ceil(len(args[0]) / limit), math.ceil(blocks / LIST_BLOCKS))
    if packet is aten.linalg_cholesky_ex:  # by blocks of columns
        return 4 + 3 * _tiles(args[0])
    if packet is aten.cholesky_solve:  # two triangular systems
        return 4 + 2 * _tiles(args[1])
    return KERNELS.get(packet, 1)


def _tiles(matrix: Tensor) -> int:
    """Blocks of columns that a factorisation takes one after another."""
    return math.ceil(matrix.shape[-1] / TILE)
