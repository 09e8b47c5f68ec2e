"""Modules over fftune.ops, with the state dicts of the modules that they replace."""
import math

import torch
from torch import Tensor, nn

from . import ops
from ._checks import expect_module, expect_one_of, expect_tensor, flag, named
from ._codes import ONLY_GROUP, codes_of_words, pairs_of_codes, words_of_codes
from ._layer_form import WIDE_SCALES
from ._library import Error
from ._ops.packed import E2M1, FORMATS, group_word
from .reference import ACTIVATIONS, quantise_weight
from .reference import quantise as quantise_tensor

__all__ = ["GatedMLP", "GatedMLPFp8", "RMSNorm", "BiasGELU", "RotaryEmbedding", "MaskedLinear",
           "MaskedMLP", "MoE", "QuantLinear", "LinearCrossEntropy", "quantise"]


def _expect_activation(act: str) -> None:
    expect_one_of("act", act, ACTIVATIONS)


def _expect_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**31:
            raise Error(f"{name} is {named(size)}: give an integer from 1 to {2**31 - 1}")


def _expect_rows(name: str, x: Tensor, weight: Tensor) -> None:
    """That x is floating point whose rows a weight [out_features, in_features] multiplies."""
    features = weight.shape[-1]
    expect_tensor(name, "x", x)
    if not x.is_floating_point() or not x.dim() or x.shape[-1] != features or x.device != weight.device:
        raise Error(f"{name}: x is {named(x)}: give floating point [..., {features}] on {weight.device}")


class GatedMLP(nn.Module):
    """The MLP of Llama, ``down_proj(act(gate_proj(x)) * up_proj(x))``, with its state dict.

    Maps [..., hidden] to [..., hidden].

    Args:
        hidden, intermediate: Features of x, and of the products before the activation.
        act: "silu", "gelu" (with erf), "gelu-tanh", "relu" or "none".
        bias: Whether down_proj has a bias.
        recompute: Save only x for the backward pass.
        device, dtype: Device and element type of the parameters.
    """

    def __init__(self, hidden: int, intermediate: int, act: str = "silu", bias: bool = False,
                 recompute: bool = False, device=None, dtype=None):
        super().__init__()
        _expect_activation(act)
        _expect_sizes(hidden=hidden, intermediate=intermediate)
        bias = flag("GatedMLP", "bias", bias)
        options = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **options)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **options)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias, **options)
        self.act = act
        self.recompute = recompute

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.ffn(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight,
                       self.down_proj.bias, residual, act=self.act, recompute=self.recompute)

    @torch.no_grad()
    def to_fp8(self, example: Tensor | None = None) -> "GatedMLPFp8":
        """The same layer in float8_e4m3fn, for inference.

        Args:
            example: Input [..., hidden] to calibrate one scale per tensor with. None: one scale per block of
                128, computed anew for every x.

        Returns:
            A ``GatedMLPFp8``.
        """
        if self.down_proj.bias is not None:
            raise Error("to_fp8: in fp8 down_proj has no bias here")
        return GatedMLPFp8(self, example)


def _scale_of(x: Tensor) -> Tensor:
    """The scale that maps the largest magnitude to 448, the largest of float8_e4m3fn; 1 for zeros."""
    largest = x.float().abs().max().reshape(1)
    return torch.where(largest > 0, largest / 448, 1.0)


class GatedMLPFp8(nn.Module):
    """A ``GatedMLP`` in float8_e4m3fn, made by ``GatedMLP.to_fp8``. Maps [..., hidden] to bfloat16."""

    def __init__(self, layer: GatedMLP, example: Tensor | None):
        super().__init__()
        self.act = layer.act
        block = example is None
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight, scale = quantise_weight(getattr(layer, name).weight, block)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", scale)
        x_scale = hidden_scale = None
        if not block:
            weight = layer.gate_proj.weight
            _expect_rows("to_fp8", example, weight)
            if not example.numel() or not example.float().isfinite().all():
                raise Error(f"to_fp8: {named(example)} is no example: give one of finite numbers")
            gate, up = (proj(example.to(weight.dtype)) for proj in (layer.gate_proj, layer.up_proj))
            x_scale = _scale_of(example)
            hidden_scale = _scale_of(ACTIVATIONS[self.act](gate) * up)
        self.register_buffer("x_scale", x_scale)
        self.register_buffer("hidden_scale", hidden_scale)

    def forward(self, x: Tensor) -> Tensor:
        _expect_rows("GatedMLPFp8", x, self.gate_proj)
        x, scale = quantise_tensor(x, self.x_scale)
        return ops.ffn_fp8(x, self.gate_proj, self.up_proj, self.down_proj, scale,
                           self.gate_proj_scale, self.up_proj_scale, self.down_proj_scale,
                           self.hidden_scale, act=self.act)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, as `fftune.ops.rmsnorm`.

    Args:
        features: Size of the last dimension.
        eps: Added to the mean of squares.
        convention: "llama", "t5" or "gemma".
        device, dtype: Device and element type of the weight.
    """

    def __init__(self, features: int, eps: float = 1e-6, convention: str = "llama", device=None,
                 dtype=None):
        super().__init__()
        _expect_sizes(features=features)
        expect_one_of("convention", convention, ("llama", "t5", "gemma"))
        start = torch.zeros if convention == "gemma" else torch.ones
        self.weight = nn.Parameter(start(features, device=device, dtype=dtype))
        self.eps = eps
        self.convention = convention

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """rmsnorm(x); with a residual (rmsnorm(s), s) of ``s = x + residual``."""
        if residual is None:
            return ops.rmsnorm(x, self.weight, eps=self.eps, convention=self.convention)
        return ops.add_rmsnorm(x, residual, self.weight, eps=self.eps, convention=self.convention)


class LinearCrossEntropy(nn.Module):
    """The loss of a language model's head without logits in memory, with the parameters of ``nn.Linear``.

    ``forward(x, labels)`` takes x [..., features] and labels int64 [...], and returns the result of
    `fftune.ops.linear_cross_entropy`.

    Args:
        features, vocab: Size of the weight [vocab, features].
        bias: Whether there is a bias [vocab].
        device, dtype: Device and element type of the parameters.
        rules: Further arguments of `fftune.ops.linear_cross_entropy`, as defaults of every call.
    """

    def __init__(self, features: int, vocab: int, bias: bool = False, device=None, dtype=None, **rules):
        super().__init__()
        _expect_sizes(features=features, vocab=vocab)
        made = nn.Linear(features, vocab, flag("LinearCrossEntropy", "bias", bias), device, dtype)
        self.weight, self.bias = made.weight, made.bias
        self.rules = rules

    def forward(self, x: Tensor, labels: Tensor, **rules) -> Tensor | tuple[Tensor, ...]:
        return ops.linear_cross_entropy(x, self.weight, labels, self.bias, **{**self.rules, **rules})


class BiasGELU(nn.Module):
    """``gelu(x + bias)``. Maps [..., features] to [..., features].

    Args:
        features: Size of the bias.
        approximate: "none" for gelu with erf, "tanh" for its approximation.
        device, dtype: Device and element type of the bias.
    """

    def __init__(self, features: int, approximate: str = "none", device=None, dtype=None):
        super().__init__()
        _expect_sizes(features=features)
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.bias_gelu(x, self.bias, approximate=self.approximate)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys [batch, tokens, heads, features] by their positions. It has no state.

    Args:
        rule: "base", "llama3" or "yarn", as in `fftune.ops.rope`.
        options: Further arguments of `fftune.ops.rope`.
    """

    def __init__(self, rule: str = "base", **options):
        super().__init__()
        self.options = {"rule": rule, **options}

    def forward(self, q: Tensor, k: Tensor | None = None, starts: Tensor | None = None
                ) -> Tensor | tuple[Tensor, Tensor]:
        return ops.rope(q, k, starts=starts, **self.options)


class MaskedLinear(nn.Module):
    """Two linear layers without bias: linear_v where the mask is set, linear_t elsewhere.

    Maps x [..., in_features] and mask [...] to [..., out_features].

    Args:
        in_features, out_features: Sizes of both weights.
        pattern: Expected distribution of the mask, as in `fftune.ops.masked_linear`.
        device, dtype: Device and element type of the parameters.
    """

    def __init__(self, in_features: int, out_features: int, pattern: str | None = None, device=None,
                 dtype=None):
        super().__init__()
        _expect_sizes(in_features=in_features, out_features=out_features)
        self.pattern = pattern
        options = {"bias": False, "device": device, "dtype": dtype}
        self.linear_v = nn.Linear(in_features, out_features, **options)
        self.linear_t = nn.Linear(in_features, out_features, **options)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return ops.masked_linear(x, mask, self.linear_v.weight, self.linear_t.weight,
                                 pattern=self.pattern)


class MaskedMLP(nn.Module):
    """Two gated MLPs: ``w2(act(w1(x)) * w3(x))`` where the mask is set, the same with u1, u2, u3 elsewhere.

    Maps x [..., hidden] and mask [...] to [..., hidden].

    Args:
        hidden, intermediate, act: As in ``GatedMLP``.
        pattern: Expected distribution of the mask, as in `fftune.ops.masked_linear`.
        device, dtype: Device and element type of the parameters.
    """

    def __init__(self, hidden: int, intermediate: int, act: str = "silu",
                 pattern: str | None = None, device=None, dtype=None):
        super().__init__()
        _expect_activation(act)
        _expect_sizes(hidden=hidden, intermediate=intermediate)
        options = {"bias": False, "device": device, "dtype": dtype}
        for expert in "wu":
            for number, (rows, columns) in enumerate(
                    ((hidden, intermediate), (intermediate, hidden), (hidden, intermediate)), 1):
                setattr(self, f"{expert}{number}", nn.Linear(rows, columns, **options))
        self.act = act
        self.pattern = pattern

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return ops.masked_ffn(x, mask, self.w1.weight, self.w3.weight, self.w2.weight,
                              self.u1.weight, self.u3.weight, self.u2.weight, act=self.act,
                              pattern=self.pattern)


class _Experts(nn.Module):
    """The weights of all experts, as transformers 5 keeps them."""

    def __init__(self, experts: int, hidden: int, intermediate: int, **options):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden, **options))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate, **options))
        for weight in (self.gate_up_proj, self.down_proj):
            bound = weight.shape[-1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)


class MoE(nn.Module):
    """A mixture of experts with its router, with the state dict of Mixtral, Qwen3-MoE and DeepSeek-V3 in
    transformers 5.

    Maps [..., hidden] to [..., hidden]. The parameters are gate.weight [experts, hidden],
    experts.gate_up_proj [experts, 2 · intermediate, hidden] and experts.down_proj [experts, hidden,
    intermediate]; shared experts are one ``GatedMLP``, shared_experts. Logits have the element type of
    gate.weight.

    Args:
        hidden, intermediate: Features of x, and of an expert's products before the activation.
        experts, top_k: Number of experts, and of those that a token chooses.
        act, recompute: As in ``GatedMLP``.
        device, dtype: Device and element type of the parameters.
        score, order, renormalise, groups, top_groups, group_score, scale: As in `fftune.ops.moe_route`.
        bias: Whether there is a float32 buffer gate.e_score_correction_bias [experts], initially zero. It
            is added to the scores for the choice alone; a load balancer may update it.
        shared: Number of experts of the same size that process every token.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, act: str = "silu",
                 recompute: bool = False, device=None, dtype=None, *, score: str = "softmax",
                 order: str = "before", renormalise: bool = False, groups: int = 0,
                 top_groups: int = 0, group_score: str = "max", scale: float = 1.0,
                 bias: bool = False, shared: int = 0):
        super().__init__()
        _expect_activation(act)
        _expect_sizes(hidden=hidden, intermediate=intermediate, experts=experts)
        if type(shared) is not int or shared < 0:
            raise Error(f"shared is {named(shared)}: give the number of shared experts, or 0")
        if type(top_k) is not int or not 1 <= top_k <= experts:
            raise Error(f"top_k is {named(top_k)} of {experts} experts: give 1 to {experts}")
        bias = flag("MoE", "bias", bias)
        self.gate = nn.Linear(hidden, experts, bias=False, device=device, dtype=dtype)
        if bias:
            self.gate.register_buffer("e_score_correction_bias",
                                      torch.zeros(experts, device=device))
        self.shared_experts = GatedMLP(hidden, shared * intermediate, act, recompute=recompute,
                                       device=device, dtype=dtype) if shared else None
        self.experts = _Experts(experts, hidden, intermediate, device=device, dtype=dtype)
        self.top_k = top_k
        self.act = act
        self.recompute = recompute
        self.router = dict(score=score, order=order, renormalise=renormalise, groups=groups,
                           top_groups=top_groups, group_score=group_score, scale=scale)

    def forward(self, x: Tensor) -> Tensor:
        _expect_rows("MoE", x, self.gate.weight)
        logits = nn.functional.linear(x.to(self.gate.weight.dtype), self.gate.weight)
        bias = getattr(self.gate, "e_score_correction_bias", None)
        ids, weights = ops.moe_route(logits, self.top_k, bias=bias, **self.router)
        y = ops.moe_ffn(x, ids, weights, self.experts.gate_up_proj, None, self.experts.down_proj,
                        act=self.act, recompute=self.recompute)
        return y if self.shared_experts is None else self.shared_experts(x, y)


def _group_of(label: str, group: int, format: str) -> int:
    """Elements that share a scale: the given number, or the format's, if it has only one."""
    group = ONLY_GROUP.get(format, group) if type(group) is int and group == 128 else group
    group_word(label, group, format)
    return group


class QuantLinear(nn.Module):
    """A linear layer whose weight has 4 or 8 bits.

    Maps [..., in_features] to [..., out_features]. The weight is in memory in the kernels' layout. State
    dicts have the tensors of compressed-tensors:

    - int4, ``(q - 8) · scale``, or with `zeros` ``(q - zero) · scale``: weight_packed, weight_scale,
      weight_shape and with `zeros` weight_zero_point, as in pack-quantized.

    - mxfp4, ``e2m1 · 2 ** (scale - 127)``: weight_packed and weight_scale, of uint8.

    - nvfp4, ``e2m1 · scale / global_scale``: weight_packed, weight_scale and weight_global_scale.

    - fp8, ``e4m3 · scale``, and int8, ``q · scale``: weight and weight_scale.

    Args:
        in_features, out_features: Size of the weight.
        bias: Whether there is a bias [out_features].
        group: Elements of a row that share a scale: 128, 64, 32, or 0 for the whole row. It divides
            in_features. 32 for mxfp4, 16 for nvfp4.
        zeros: Whether int4 has zero points.
        format: "int4", "mxfp4", "fp8", "int8" or "nvfp4".
        device, dtype: Device and element type of the bias, and of int4's scales.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, group: int = 128,
                 zeros: bool = False, device=None, dtype=None, format: str = "int4"):
        super().__init__()
        _expect_sizes(in_features=in_features, out_features=out_features)
        expect_one_of("format", format, FORMATS)
        group = _group_of("QuantLinear", group, format)
        bias, self.zeros = flag("QuantLinear", "bias", bias), flag("QuantLinear", "zeros", zeros)
        if zeros and format != "int4":
            raise Error(f"QuantLinear: {format} has no zero points: leave out zeros")
        if group and in_features % group:
            raise Error(f"QuantLinear: groups of {group} do not divide in_features={in_features}: "
                        "give group=0, or another")
        self.in_features, self.out_features, self.group = in_features, out_features, group
        self.format = format
        dtype = dtype or torch.get_default_dtype()
        groups = in_features // group if group else 1
        width = in_features if format in WIDE_SCALES else -(-in_features // 2)
        codes = torch.zeros(out_features, width, dtype=torch.uint8, device=device)
        of_scale = {"int4": dtype, "mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(format, torch.float32)
        scale = torch.zeros(out_features, groups, dtype=of_scale, device=device)
        if format == "nvfp4":
            scale = scale, torch.ones(1, device=device)
        for name in ("packed", "scale", "zero"):
            self.register_buffer(name, None, persistent=False)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if (
            bias) else None
        self._set(codes, scale, torch.zeros_like(scale, dtype=torch.uint8) if zeros else None)

    def _set(self, codes: Tensor, scale: Tensor | tuple[Tensor, Tensor], zero: Tensor | None) -> None:
        if self.format == "nvfp4":  # as it is saved: 1 / (1 / x) may be another number
            scale, own = scale
            self.register_buffer("global_scale", own.view(torch.float32), persistent=False)
            scale = scale, 1 / own
        packed = ops.pack_weight(codes, scale, zero, k=self.in_features, group=self.group,
                                 format=self.format)
        self.packed, self.scale, self.zero = packed[:3]

    def _apply(self, fn, recurse=True):
        kept = {name: getattr(self, name, None) for name in ("scale", "global_scale")}
        super()._apply(fn, recurse)
        for name, scale in kept.items():  # module.to(dtype) is for the tokens' type
            if self.format != "int4" and scale is not None and getattr(self, name).dtype != scale.dtype:
                setattr(self, name, scale.to(getattr(self, name).device))
        return self

    @property
    def packed_weight(self) -> ops.PackedWeight:
        return ops.PackedWeight(self.packed, self.scale, self.zero, self.out_features,
                                self.in_features, self.group, self.format)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, group: int = 128, zeros: bool = False,
                    format: str = "int4") -> "QuantLinear":
        """The layer with its weight rounded to the nearest codes."""
        if not isinstance(linear, nn.Linear):
            raise Error(f"QuantLinear: {type(linear).__name__} is no torch.nn.Linear: give one")
        w = linear.weight
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, group, zeros,
                    w.device, w.dtype, format)
        if not w.isfinite().all():
            raise Error("QuantLinear: the weight is not finite")
        layer._set(*_ROUNDINGS[format](w.float().unflatten(1, (-1, layer.group or w.shape[1])), zeros,
                                       w.dtype))
        if linear.bias is not None:
            layer.bias = linear.bias
        return layer.train(linear.training)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.packed_weight, self.bias, residual)

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, "
                f"bias={self.bias is not None}, group={self.group}, zeros={self.zeros}, "
                f"format={self.format!r}")

    def _saved_names(self) -> tuple[str, ...]:
        if self.format in WIDE_SCALES:
            return "weight", "weight_scale"
        if self.format == "nvfp4":
            return "weight_packed", "weight_scale", "weight_global_scale"
        return ("weight_packed", "weight_scale", *(("weight_shape",) if self.format == "int4" else ()),
                *(("weight_zero_point",) if self.zeros else ()))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        codes, scale, zero = self.packed_weight.unpack()
        if self.format in WIDE_SCALES:
            saved = [codes.view(_ELEMENTS[self.format]), scale]
        elif self.format == "mxfp4":
            saved = [codes, scale]
        elif self.format == "nvfp4":
            saved = [codes, scale[0], self.global_scale]
        else:
            words = nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
            saved = [words, scale, torch.tensor([self.out_features, self.in_features])]
        if zero is not None:
            saved.append(words_of_codes(zero, 0))
        for name, tensor in zip(self._saved_names(), saved):
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys,
                              unexpected_keys, error_msgs):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs)
        names = [prefix + name for name in self._saved_names()]
        unexpected_keys[:] = [key for key in unexpected_keys if key not in names]
        absent = [name for name in names if name not in state_dict]
        missing_keys.extend(absent)
        if absent:
            return
        try:
            for name in names:
                expect_tensor("QuantLinear", name, state_dict[name])
                if state_dict[name].is_meta:
                    raise Error(f"QuantLinear: {name} is on meta: give its values")
            self._load(prefix, *(state_dict[name].to(self.packed.device) for name in names))
        except Error as error:
            error_msgs.append(str(error))

    def _load(self, prefix, codes, scale, shape=None, zero_words=None) -> None:
        n, k = self.out_features, self.in_features
        if self.format == "nvfp4":
            own, shape = shape, None
            if own.numel() != 1 or not own.dtype.is_floating_point or not 0 < own.float().abs().item() < math.inf:
                raise Error(f"{prefix}weight_global_scale is {named(own)}: give one number that is not 0")
        if shape is not None and shape.tolist() != [n, k]:
            raise Error(f"{prefix}weight_shape is {shape.tolist()}, not {[n, k]}")
        groups = k // self.group if self.group else 1
        width, dtype = {"int4": (-(-k // 8), torch.int32), "mxfp4": (k // 2, torch.uint8),
            "nvfp4": (k // 2, torch.uint8)}.get(
            self.format, (k, _ELEMENTS.get(self.format)))
        wanted = {self._saved_names()[0]: (codes, (n, width)), "weight_scale": (scale, (n, groups))}
        if zero_words is not None:
            wanted["weight_zero_point"] = zero_words, (-(-n // 8), groups)
        for name, (tensor, right) in wanted.items():
            if tuple(tensor.shape) != right:
                raise Error(f"{prefix}{name} is {[*tensor.shape]}, not {[*right]}")
        if codes.dtype != dtype:
            raise Error(f"{prefix}{self._saved_names()[0]} is {codes.dtype}, not {dtype}")
        if scale.is_floating_point() and not scale.float().isfinite().all():
            raise Error(f"{prefix}weight_scale is not finite")
        zero = None if zero_words is None else codes_of_words(zero_words, n, 0)
        codes = codes.contiguous().view(torch.uint8)
        if self.format == "int4":
            codes = codes[:, :-(-k // 2)].contiguous()
        if self.format == "nvfp4":
            self._set(codes, (scale.to(torch.float8_e4m3fn).contiguous(), own.float().reshape(1)), None)
        else:
            self._set(codes, scale.to(self.scale.dtype).contiguous(), zero)


# Rounding of a weight [n, groups, elements of a group] to (codes, scale, zero) of pack_weight.

def _to_int4(grouped: Tensor, zeros: bool, dtype: torch.dtype):
    low = grouped.amin(-1).clamp(max=0)
    scale = (grouped.amax(-1).clamp(min=0) - low) / 15 if zeros else grouped.abs().amax(-1) / 7
    scale = torch.where(scale > 0, scale, 1.0).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, 15) if zeros else None
    offset = 8 if zero is None else zero.unsqueeze(-1)
    q = (grouped / scale.float().unsqueeze(-1) + offset).round().clamp(0, 15).to(torch.uint8)
    return pairs_of_codes(q.flatten(1)), scale, None if zero is None else zero.to(torch.uint8)


def _to_mxfp4(grouped: Tensor, zeros: bool, dtype: torch.dtype):
    """The exponent of the largest element, less that of 4, as OCP MX has it."""
    largest = grouped.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-127, 127)
    exponent = torch.where(largest > 0, exponent, 0)
    scaled = torch.ldexp(grouped, -exponent.unsqueeze(-1))
    return _to_e2m1(scaled), (exponent + 127).to(torch.uint8), None


def _to_e2m1(scaled: Tensor) -> Tensor:
    """The nearest codes, in pairs."""
    middles = [(a + b) / 2 for a, b in zip(E2M1, E2M1[1:])]
    magnitudes = torch.bucketize(scaled.abs(), torch.tensor(middles, device=scaled.device))
    return pairs_of_codes((magnitudes + 8 * (scaled < 0)).to(torch.uint8).flatten(1))


def _to_nvfp4(grouped: Tensor, zeros: bool, dtype: torch.dtype):
    """The largest element of all is 6 times the largest scale, 448, as compressed-tensors has it."""
    largest = grouped.abs().amax(-1)
    whole = largest.max() if largest.numel() else grouped.new_zeros(())
    own = torch.where(whole > 0, 448 * 6 / whole, 1.0).reshape(1)
    scale = (largest / 6 * own).clamp(max=448).to(torch.float8_e4m3fn)
    step = (scale.float() / own).unsqueeze(-1)
    return _to_e2m1(grouped / torch.where(step > 0, step, 1.0)), (scale, own), None


def _to_8_bits(largest: int, element: torch.dtype):
    def rounding(grouped: Tensor, zeros: bool, dtype: torch.dtype):
        scale = grouped.abs().amax(-1) / largest
        scale = torch.where(scale > 0, scale, 1.0)
        q = (grouped / scale.unsqueeze(-1)).clamp(-largest, largest)
        q = q.round() if element == torch.int8 else q
        return q.to(element).flatten(1), scale, None
    return rounding


_ELEMENTS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_ROUNDINGS = {"int4": _to_int4, "mxfp4": _to_mxfp4, "fp8": _to_8_bits(448, torch.float8_e4m3fn),
              "int8": _to_8_bits(127, torch.int8), "nvfp4": _to_nvfp4}


def _expect_no_hooks(name: str, layer: nn.Linear) -> None:
    if "forward" in layer.__dict__ or any(getattr(layer, f"_{kind}_hooks") for kind in (
            "forward", "forward_pre", "backward", "backward_pre")):
        raise Error(f"quantise: {name} has hooks, or a forward of its own, which would not be called: "
                    "remove them, or skip it")


def quantise(module: nn.Module, format: str = "int4", group: int = 128, zeros: bool = False,
             skip: tuple[str, ...] = ("lm_head",)) -> nn.Module:
    """Rounds the weight of each ``nn.Linear`` of a module to 4 or 8 bits, in place.

    Weights are rounded to the nearest code, without calibration. Other modules stay as they are, including
    experts whose weights are one tensor. A layer in several places becomes one layer in all of them.

    Args:
        module: The module; a single ``nn.Linear`` too.
        format: "int4", "mxfp4", "fp8", "int8" or "nvfp4".
        group, zeros: As in ``QuantLinear``.
        skip: Layers that stay as they are, by the last part of their name.

    Returns:
        The module; for an ``nn.Linear``, the ``QuantLinear`` that replaces it.
    """
    expect_one_of("format", format, FORMATS)
    group = _group_of("quantise", group, format)
    expect_module("quantise", module)
    flag("quantise", "zeros", zeros)
    if not isinstance(skip, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in skip):
        raise Error(f"quantise: skip is {named(skip)}: give a tuple of the last parts of names")
    if type(module) is nn.Linear:
        _expect_no_hooks("the layer", module)
        return QuantLinear.from_linear(module, group, zeros, format)
    found = [(name, child) for name, child in module.named_modules(remove_duplicate=False)
             if type(child) is nn.Linear and name.rpartition(".")[2] not in skip]
    for name, child in found:
        _expect_no_hooks(name, child)
        if group and child.in_features % group:
            raise Error(f"quantise: groups of {group} do not divide in_features="
                        f"{child.in_features} of {name}: give group=0, or skip it")
    rounded: dict[nn.Linear, QuantLinear] = {}
    for name, child in found:
        parent, _, own = name.rpartition(".")
        if child not in rounded:
            rounded[child] = QuantLinear.from_linear(child, group, zeros, format)
        setattr(module.get_submodule(parent), own, rounded[child])
    return module
