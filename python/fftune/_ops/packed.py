"""Packed weights of 4 bits: pack_weight, its inverse, and linear with such a weight."""
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import named
from .._codes import codes_of_pairs
from .._custom import OPS, call, gradient, rows
from .._declare import declare
from .._library import Error

declare("linear_packed", "linear", "x, w, scale=w_scale, zero=w_zero?, bias?, residual?, n, group",
        "y", fixed={"weights": "int4"}, label="linear", by_row=True)

declare("ffn_packed", "ffn", "x, w_gate, w_up, w_down, gate_scale=w_gate_scale, "
        "up_scale=w_up_scale, down_scale=w_down_scale, gate_zero=w_gate_zero?, "
        "up_zero=w_up_zero?, down_zero=w_down_zero?, bias=b_down?, residual?, h, group, act", "y",
        fixed={"weights": "int4"}, label="ffn", by_row=True)

_GROUPS = {128: "128", 64: "64", 32: "32", 0: "row"}

# The shapes of the results depend on the group: an op for each.
for _word in _GROUPS.values():
    declare(f"pack_weight_{_word}", "pack-weight", "codes, scale, zero?, k",
            "w, w_scale, w_zero?zero", label="pack-weight",
            fixed={"weights": "int4", "direction": "pack", "group": _word})
    declare(f"unpack_weight_{_word}", "pack-weight", "w, scale=w_scale, zero=w_zero?, n, k",
            "codes=unpacked, plain=unpacked_scale, plain_zero=unpacked_zero?zero",
            label="pack-weight",
            fixed={"weights": "int4", "direction": "unpack", "group": _word})


def group_word(label: str, group: int) -> str:
    """The library's word for a group of that many elements of k; 0: a whole row."""
    if type(group) is not int or group not in _GROUPS:
        raise Error(f"{label}: group is {named(group)}: give 128, 64, 32, or 0 for a whole row")
    return _GROUPS[group]


class PackedWeight(NamedTuple):
    """A weight [n, k] of 4 bits in the layout that kernels read, as `pack_weight` makes it.

    Element (i, j) is ``(q - zero) * scale``, or ``(q - 8) * scale`` if `zero` is None. There is one scale,
    and one zero point, per row and `group` elements of k; ``group=0`` stands for one per row.
    """

    w: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    group: int

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero): the arguments of `pack_weight`, exactly."""
        return unpack_weight(self)

    def dense(self) -> Tensor:
        """The weight [n, k] in the element type of its scales."""
        codes, scale, zero = unpack_weight(self)
        q = codes_of_pairs(codes, self.k).float()
        groups = torch.arange(self.k, device=q.device) // (self.group or self.k)
        offset = 8.0 if zero is None else zero.float()[:, groups]
        return ((q - offset) * scale.float()[:, groups]).to(scale.dtype)


def pack_weight(codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, k: int | None = None,
                group: int = 128) -> PackedWeight:
    """Packs a weight of 4 bits into the layout that kernels read.

    The packing is exact: ``PackedWeight.unpack()`` returns the same codes, scales and zero points.

    Args:
        codes: uint8 [n, ⌈k / 2⌉]. A byte has two neighbouring elements of a row, the first in its low
            four bits.
        scale: [n, ⌈k / group⌉], or [n, 1] with ``group=0``.
        zero: Zero points, uint8 with the shape of scale. None: the zero point is 8.
        k: Elements of a row; twice the bytes of a row by default.
        group: Elements of a row that share a scale: 128, 64, 32, or 0 for the whole row.

    Returns:
        A ``PackedWeight``.
    """
    word = group_word("pack-weight", group)
    if not isinstance(codes, Tensor) or codes.dim() != 2:
        raise Error(f"pack-weight: codes is {named(codes)}: give a tensor [n, ceil(k / 2)]")
    k = 2 * codes.shape[1] if k is None else k
    w, w_scale, w_zero = call(getattr(OPS, f"pack_weight_{word}"), codes, scale, zero, k)
    return PackedWeight(w, w_scale, None if zero is None else w_zero, codes.shape[0], k, group)


def unpack_weight(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero): the arguments of `pack_weight`, exactly."""
    if not isinstance(packed, PackedWeight):
        raise Error(f"pack-weight: packed is {named(packed)}: give what pack_weight gave")
    w, scale, zero, n, k, group = packed
    op = getattr(OPS, f"unpack_weight_{group_word('pack-weight', group)}")
    codes, plain, plain_zero = call(op, w, scale, zero, n, k)
    return codes, plain, None if zero is None else plain_zero


def _save(ctx, inputs, output):
    x, w, scale, zero, bias, residual, n, group = inputs
    ctx.save_for_backward(w, scale, zero)
    ctx.sizes = n, x.shape[-1], next(size for size, word in _GROUPS.items() if word == group)


@gradient("linear_packed", _save)
def _(ctx, dy):
    needs = ctx.needs_input_grad
    dx = dy @ PackedWeight(*ctx.saved_tensors, *ctx.sizes).dense() if needs[0] else None
    return (dx, None, None, None, rows(dy).sum(0) if needs[4] else None, dy if needs[5] else None,
            None, None)


def _save_ffn(ctx, inputs, output):
    x, *weights, bias, residual, h, group, ctx.act = inputs
    ctx.save_for_backward(x, *weights)
    ctx.sizes = h, x.shape[-1], next(size for size, word in _GROUPS.items() if word == group)


@gradient("ffn_packed", _save_ffn)
def _(ctx, dy):
    x, *weights = ctx.saved_tensors
    h, d, group = ctx.sizes
    needs, dx = ctx.needs_input_grad, None
    if needs[0]:
        w_gate, w_up, w_down = (
            PackedWeight(*weights[i::3], *size, group).dense()
            for i, size in enumerate(((h, d), (h, d), (d, h))))
        d_gate, d_up = call(OPS.act_mul_backward, dy @ w_down, x @ w_gate.T, x @ w_up.T, ctx.act)
        dx = d_gate @ w_gate + d_up @ w_up
    return (dx, *[None] * 9, rows(dy).sum(0) if needs[10] else None, dy if needs[11] else None,
            None, None, None)


def ffn_packed(x: Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight,
               bias: Tensor | None, residual: Tensor | None, act: str) -> Tensor:
    weights = gate, up, down
    for name, weight in zip(("w_gate", "w_up", "w_down"), weights):
        if not isinstance(weight, PackedWeight):
            raise Error(f"ffn: {name} is {named(weight)}: give three packed weights, or three dense "
                        "ones")
        if (weight.group, weight.zero is None) != (gate.group, gate.zero is None):
            raise Error(f"ffn: {name} has other groups than w_gate, or zero points where it has none")
    if (up.n, up.k) != (gate.n, gate.k) or (down.n, down.k) != (gate.k, gate.n):
        raise Error(f"ffn: w_gate is [{gate.n}, {gate.k}], w_up [{up.n}, {up.k}], w_down [{down.n}, "
                    f"{down.k}]: give [h, d], [h, d] and [d, h]")
    return call(OPS.ffn_packed, x, *(w.w for w in weights), *(w.scale for w in weights),
                *(w.zero for w in weights), bias, residual, gate.n, group_word("ffn", gate.group), act)


def linear_packed(x: Tensor, packed: PackedWeight, bias: Tensor | None = None,
                  residual: Tensor | None = None) -> Tensor:
    w, scale, zero, n, _, group = packed
    return call(OPS.linear_packed, x, w, scale, zero, bias, residual, n,
                group_word("linear", group))
