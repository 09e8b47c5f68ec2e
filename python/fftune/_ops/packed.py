"""Packed weights of 4 and 8 bits: pack_weight, its inverse, and ops with such weights."""
from typing import NamedTuple

import torch
from torch import Tensor

from .._checks import has_sizes, named
from .._codes import ONLY_GROUP, codes_of_pairs
from .._custom import OPS, call, gradient, rows
from .._declare import declare
from .._library import Error

FORMATS = ("int4", "mxfp4", "fp8", "int8", "nvfp4")
_GROUPS = {128: "128", 64: "64", 32: "32", 0: "row"}


def suffix(format: str) -> str:
    """The last part of the names of a format's ops."""
    if not isinstance(format, str) or format not in FORMATS:
        raise Error(f"a packed weight has format {named(format)}: give one of {', '.join(FORMATS)}")
    return "" if format == "int4" else f"_{format}"


def has_zeros(format: str) -> bool:
    return format == "int4"


def scales_rows(format: str) -> bool:
    """Whether rows have scales beside those of groups."""
    return format == "nvfp4"


def autocasts(format: str, *scales: str, keeps: tuple[str, ...] = ()) -> dict:
    """The rules of autocast for packed weights: scales keep their type, but int4's take the tokens' type."""
    return {"casts": True, "keeps": keeps if format == "int4" else (*keeps, *scales)}


def _pack_name(format: str, word: str) -> str:
    return f"weight{suffix(format)}" + ("" if format in ONLY_GROUP else f"_{word}")


def _declare_format(format: str) -> None:
    fixed = {"weights": format}
    zero, zeros, out_zero, plain_zero = (
        ("zero=w_zero?, ", "gate_zero=w_gate_zero?, up_zero=w_up_zero?, down_zero=w_down_zero?, ",
         ", w_zero?zero", ", plain_zero=unpacked_zero?zero") if has_zeros(format) else [""] * 4)
    declare(f"linear_packed{suffix(format)}", "linear",
            f"x, w, scale=w_scale, {zero}bias?, residual?, n, group", "y", fixed=fixed,
            label="linear", by_row=True, **autocasts(format, "scale"))
    declare(f"ffn_packed{suffix(format)}", "ffn",
            "x, w_gate, w_up, w_down, gate_scale=w_gate_scale, up_scale=w_up_scale, "
            f"down_scale=w_down_scale, {zeros}bias=b_down?, residual?, h, group, act", "y",
            fixed=fixed, label="ffn", by_row=True, **autocasts(format, "gate_scale", "up_scale", "down_scale"))
    # The shapes of the results depend on the group: an op for each.
    rows, plain_rows = ("row_scale, ", ", plain_rows=unpacked_row_scale") if scales_rows(format) else ("", "")
    for word in ("128",) if format in ONLY_GROUP else _GROUPS.values():
        name, of_group = _pack_name(format, word), {**fixed, "group": word}
        declare(f"pack_{name}", "pack-weight",
                f"codes, scale, {rows}{'zero?, ' if zero else ''}k", f"w, w_scale{out_zero}",
                label="pack-weight", fixed={**of_group, "direction": "pack"})
        declare(f"unpack_{name}", "pack-weight", f"w, scale=w_scale, {zero}n, k",
                f"codes=unpacked, plain=unpacked_scale{plain_zero}{plain_rows}", label="pack-weight",
                fixed={**of_group, "direction": "unpack"})


for _format in FORMATS:
    _declare_format(_format)


def group_word(label: str, group: int, format: str = "int4") -> str:
    """The library's word for a group of that many elements of k; 0: a whole row."""
    if not isinstance(format, str) or format not in FORMATS:
        raise Error(f"{label}: format is {named(format)}: give one of {', '.join(FORMATS)}")
    if format in ONLY_GROUP:
        if type(group) is not int or group != ONLY_GROUP[format]:
            raise Error(f"{label}: group is {named(group)}: {format} has groups of {ONLY_GROUP[format]} alone")
        return "128"  # the option's default, which stands for those of the format
    if type(group) is not int or group not in _GROUPS:
        raise Error(f"{label}: group is {named(group)}: give 128, 64, 32, or 0 for a whole row")
    return _GROUPS[group]


def _group_of(word: str, format: str) -> int:
    return ONLY_GROUP.get(format) or next(g for g, own in _GROUPS.items() if own == word)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values_of(codes: Tensor, k: int, format: str) -> Tensor:
    """The values [n, k] of plain codes before their scales, float32; of int4 without zero points."""
    if format == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if format == "int8":
        return codes.view(torch.int8).float()
    codes = codes_of_pairs(codes, k)
    if format == "int4":
        return codes.float()
    return torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)[codes.long()]


def scales_of(scale: Tensor | tuple[Tensor, Tensor], format: str) -> Tensor:
    """Scales as float32."""
    if scales_rows(format):
        scale, rows = scale
        return scale.float() * rows[:, None]
    if format != "mxfp4":
        return scale.float()
    return torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))


class PackedWeight(NamedTuple):
    """A weight [n, k] of 4 or 8 bits in the layout that kernels read, as `pack_weight` makes it.

    Element (i, j) is the value of its code times the scale of its row and group of k:

    - int4: ``(q - zero) * scale``, or ``(q - 8) * scale`` if `zero` is None. Scales have the tokens' type.
    - mxfp4: ``e2m1 * 2 ** (scale - 127)``, with uint8 scales and groups of 32.
    - fp8: ``e4m3 * scale``, int8: ``q * scale``, with float32 scales.
    - nvfp4: ``e2m1 * scale * row_scale``, with e4m3 scales, groups of 16 and a float32 scale of each row.

    There is one scale, and one zero point, per row and `group` elements of k; ``group=0`` stands for one per
    row.
    """

    w: Tensor
    scale: Tensor
    zero: Tensor | None
    n: int
    k: int
    group: int
    format: str = "int4"

    def unpack(self) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor], Tensor | None]:
        """(codes, scale, zero): the arguments of `pack_weight`, exactly."""
        return unpack_weight(self)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [n, k]; by default in the element type of int4's scales, else in float32."""
        codes, scale, zero = unpack_weight(self)
        values = values_of(codes, self.k, self.format)
        groups = torch.arange(self.k, device=values.device) // (self.group or self.k)
        if self.format == "int4":
            values = values - (8.0 if zero is None else zero.float()[:, groups])
        if dtype is None:
            dtype = scale.dtype if self.format == "int4" else torch.float32
        return (values * scales_of(scale, self.format)[:, groups]).to(dtype)


def pack_weight(codes: Tensor, scale: Tensor | tuple[Tensor, Tensor], zero: Tensor | None = None, *,
                k: int | None = None, group: int = 128, format: str = "int4") -> PackedWeight:
    """Packs a weight of 4 or 8 bits into the layout that kernels read.

    The packing is exact: ``PackedWeight.unpack()`` returns the same codes, scales and zero points.

    Args:
        codes: Codes of 4 bits, uint8 [n, ⌈k / 2⌉]. A byte has two neighbouring elements of a row, the
            first in its low four bits. Codes of 8 bits are uint8, float8_e4m3fn or int8 [n, k].
        scale: Scales of groups, [n, k / group], or [n, 1] with ``group=0``. Those of int4 have the
            tokens' type, those of mxfp4 uint8, those of fp8 and int8 float32. For nvfp4 a pair of
            float8_e4m3fn [n, k / 16] and float32 [n], or one number for all rows.
        zero: Zero points of int4, uint8 with the shape of scale. None: the zero point is 8.
        k: Elements of a row; by default as many as the codes of a row.
        group: Elements of a row that share a scale: 128, 64 or 32, which divides k, or 0 for the whole row.
            32 for mxfp4, 16 for nvfp4.
        format: "int4", "mxfp4", "fp8", "int8" or "nvfp4".

    Returns:
        A ``PackedWeight``.
    """
    word = group_word("pack-weight", group, format)
    if not has_sizes(codes) or codes.dim() != 2:
        raise Error(f"pack-weight: codes is {named(codes)}: give a tensor [n, bytes of a row]")
    if format in ("fp8", "int8"):
        if codes.dtype in (torch.float8_e4m3fn, torch.int8):
            codes = codes.view(torch.uint8)
        if format == "fp8" and bool(((codes & 127) == 127).any()):
            raise Error("pack-weight: codes have NaN: no weight of fp8 is NaN")
        k = codes.shape[1] if k is None else k
    else:
        k = 2 * codes.shape[1] if k is None else k
    op = getattr(OPS, f"pack_{_pack_name(format, word)}")
    if not has_zeros(format):
        if zero is not None:
            raise Error(f"pack-weight: zero is {named(zero)}: {format} has no zero points")
        if scales_rows(format):
            scale = _nvfp4_scales(scale, codes.shape[0])
            return PackedWeight(*call(op, codes, *scale, k), None, codes.shape[0], k, group, format)
        return PackedWeight(*call(op, codes, scale, k), None, codes.shape[0], k, group, format)
    w, w_scale, w_zero = call(op, codes, scale, zero, k)
    return PackedWeight(w, w_scale, None if zero is None else w_zero, codes.shape[0], k, group)


def _nvfp4_scales(scale, n: int) -> tuple[Tensor, Tensor]:
    """Bytes [n, groups] and float32 [n]."""
    if not isinstance(scale, tuple) or len(scale) != 2 or not all(isinstance(s, Tensor) for s in scale):
        raise Error(f"pack-weight: scale is {named(scale)}: nvfp4 has a pair, scales of groups and of rows")
    groups, rows = scale
    if groups.dtype == torch.float8_e4m3fn:
        groups = groups.view(torch.uint8)
    if groups.dtype == torch.uint8 and bool(((groups & 127) == 127).any()):
        raise Error("pack-weight: scales have NaN: no scale of nvfp4 is NaN")
    return groups, rows.expand(n).contiguous() if rows.numel() == 1 else rows


def unpack_weight(packed: PackedWeight) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor], Tensor | None]:
    """(codes, scale, zero): the arguments of `pack_weight`, exactly."""
    if not isinstance(packed, PackedWeight):
        raise Error(f"pack-weight: packed is {named(packed)}: give what pack_weight gave")
    w, scale, zero, n, k, group, format = packed
    op = getattr(OPS, f"unpack_{_pack_name(format, group_word('pack-weight', group, format))}")
    if scales_rows(format):
        codes, groups, rows = call(op, w, scale, n, k)
        return codes, (groups.view(torch.float8_e4m3fn), rows), None
    if not has_zeros(format):
        return (*call(op, w, scale, n, k), None)
    codes, plain, plain_zero = call(op, w, scale, zero, n, k)
    return codes, plain, None if zero is None else plain_zero


def parts_of(*weights: PackedWeight) -> tuple[Tensor | None, ...]:
    """The tensors of packed weights of one format in the order of ops: codes, scales, zero points."""
    zeros = tuple(w.zero for w in weights) if has_zeros(weights[0].format) else ()
    return (*(w.w for w in weights), *(w.scale for w in weights), *zeros)


def _weights_of(tensors, sizes, group: str, format: str) -> list[PackedWeight]:
    """The inverse of parts_of."""
    count = len(sizes)
    group = _group_of(group, format)
    return [PackedWeight(tensors[i], tensors[count + i], tensors[2 * count + i] if has_zeros(format) else None,
                         *sizes[i], group, format) for i in range(count)]


def _differentiate(format: str) -> None:
    count = 3 if has_zeros(format) else 2  # tensors of a weight

    def save(ctx, inputs, output):
        x, *weight = inputs[:1 + count]
        ctx.save_for_backward(*weight)
        *_, n, group = inputs
        ctx.sizes = (n, x.shape[-1]), group

    @gradient(f"linear_packed{suffix(format)}", save)
    def _(ctx, dy):
        needs, (size, group) = ctx.needs_input_grad, ctx.sizes
        dx = None
        if needs[0]:
            weight, = _weights_of(ctx.saved_tensors, [size], group, format)
            dx = dy @ weight.dense(dy.dtype)
        return (dx, *[None] * count, rows(dy).sum(0) if needs[1 + count] else None,
                dy if needs[2 + count] else None, None, None)

    def save_ffn(ctx, inputs, output):
        x, *weights = inputs[:1 + 3 * count]
        *_, h, group, ctx.act = inputs
        ctx.save_for_backward(x, *weights)
        ctx.sizes = h, group

    @gradient(f"ffn_packed{suffix(format)}", save_ffn)
    def _(ctx, dy):
        x, *weights = ctx.saved_tensors
        (h, group), d = ctx.sizes, x.shape[-1]
        needs, dx = ctx.needs_input_grad, None
        if needs[0]:
            w_gate, w_up, w_down = (w.dense(dy.dtype) for w in _weights_of(
                weights, [(h, d), (h, d), (d, h)], group, format))
            d_hidden, gate, up = dy @ w_down, x @ w_gate.T, x @ w_up.T
            d_gate, d_up = ((d_hidden * up, d_hidden * gate) if ctx.act == "none" else
                            call(OPS.act_mul_backward, d_hidden, gate, up, ctx.act))
            dx = d_gate @ w_gate + d_up @ w_up
        return (dx, *[None] * (3 * count), rows(dy).sum(0) if needs[1 + 3 * count] else None,
                dy if needs[2 + 3 * count] else None, None, None, None)


for _format in FORMATS:
    _differentiate(_format)


def ffn_packed(x: Tensor, gate: PackedWeight, up: PackedWeight, down: PackedWeight,
               bias: Tensor | None, residual: Tensor | None, act: str) -> Tensor:
    weights = gate, up, down
    for name, weight in zip(("w_gate", "w_up", "w_down"), weights):
        if not isinstance(weight, PackedWeight):
            raise Error(f"ffn: {name} is {named(weight)}: give three packed weights, or three dense "
                        "ones")
        if format_of(weight) != format_of(gate):
            raise Error(f"ffn: {name} has other groups than w_gate, another format, or zero points where it "
                        "has none")
    if (up.n, up.k) != (gate.n, gate.k) or (down.n, down.k) != (gate.k, gate.n):
        raise Error(f"ffn: w_gate is [{gate.n}, {gate.k}], w_up [{up.n}, {up.k}], w_down [{down.n}, "
                    f"{down.k}]: give [h, d], [h, d] and [d, h]")
    return call(getattr(OPS, f"ffn_packed{suffix(gate.format)}"), x, *parts_of(*weights), bias, residual,
                gate.n, group_word("ffn", gate.group, gate.format), act)


def named_packed(label: str, name: str, weight, words: str) -> None:
    if not isinstance(weight, PackedWeight):
        raise Error(f"{label}: {name} is {named(weight)}: give {words}, or dense ones")


def format_of(weight: PackedWeight) -> tuple:
    """Equal for weights that one op can have."""
    return weight.format, weight.group, weight.zero is None


def packed_word(label: str, weight: PackedWeight) -> str:
    """Format and group in one word: "int4-128"."""
    return f"{weight.format}-{group_word(label, weight.group, weight.format)}"


def linear_packed(x: Tensor, packed: PackedWeight, bias: Tensor | None = None,
                  residual: Tensor | None = None) -> Tensor:
    return call(getattr(OPS, f"linear_packed{suffix(packed.format)}"), x, *parts_of(packed), bias, residual,
                packed.n, group_word("linear", packed.group, packed.format))
