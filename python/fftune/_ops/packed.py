"""Packed weights of 4 bits: pack_weight, its inverse, and linear with such a weight."""
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import named
from .._custom import OPS, call, gradient, rows
from .._declare import declare
from .._library import Error

declare("linear_packed", "linear", "x, w, scale=w_scale, zero=w_zero?, bias?, residual?, n, group",
        "y", fixed={"weights": "int4"}, label="linear", by_row=True)

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
    """A weight [n, k] as `pack_weight` gives it: (q - zero) * scale, or (q - 8) * scale where zero
    is None, with a scale for each `group` elements of a row, or with group 0 for each row."""

    w: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    group: int

    def unpack(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero) as `pack_weight` took them."""
        return unpack_weight(self)

    def dense(self) -> Tensor:
        """The weight [n, k] in the type of its scales."""
        codes, scale, zero = unpack_weight(self)
        q = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :self.k].float()
        groups = torch.arange(self.k, device=q.device) // (self.group or self.k)
        offset = 8.0 if zero is None else zero.float()[:, groups]
        return ((q - offset) * scale.float()[:, groups]).to(scale.dtype)


def pack_weight(codes: Tensor, scale: Tensor, zero: Tensor | None = None, *, k: int | None = None,
                group: int = 128) -> PackedWeight:
    """The weight in the order in which kernels read it: exact, and PackedWeight.unpack() is the
    inverse.

    `codes` uint8 [n, ceil(k / 2)]: two neighbouring elements of a row in a byte, the first in its
    low bits. `scale` [n, groups of k]; `zero` uint8 of the same shape. k is even unless given.
    """
    word = group_word("pack-weight", group)
    if not isinstance(codes, Tensor) or codes.dim() != 2:
        raise Error(f"pack-weight: codes is {named(codes)}: give a tensor [n, ceil(k / 2)]")
    k = 2 * codes.shape[1] if k is None else k
    w, w_scale, w_zero = call(getattr(OPS, f"pack_weight_{word}"), codes, scale, zero, k)
    return PackedWeight(w, w_scale, None if zero is None else w_zero, codes.shape[0], k, group)


def unpack_weight(packed: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero) as `pack_weight` took them."""
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


def linear_packed(x: Tensor, packed: PackedWeight, bias: Tensor | None = None,
                  residual: Tensor | None = None) -> Tensor:
    w, scale, zero, n, _, group = packed
    return call(OPS.linear_packed, x, w, scale, zero, bias, residual, n,
                group_word("linear", group))
