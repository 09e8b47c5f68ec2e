"""Linear layers with weights of 4 and 8 bits by linear with a packed weight.

The layouts are those of GPTQModel and AutoGPTQ, AutoAWQ, compressed-tensors' pack-quantized,
int-quantized and float-quantized. A layer is recognised by the names, types and shapes of its tensors.
Those of GPTQ and AWQ, which some kernels reorder, are compared with what the layer's own forward
computes. Those of compressed-tensors have a scheme that says what they are; their forward would make them
dense. Where the scheme has rounded activations, the package's own function rounds them first. Its scales
have the type of x, so they are not those of the ops' `quantise`. The Linear8bitLt of bitsandbytes rounds
activations to integers, but for outliers, so it is left alone.

The codes are packed in the order of kernels and leave the module, which has None in their place. State
dicts give them back as they were, and so do load_state_dict() and unpatch(), which end the replacement.
"""
import itertools
import types
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from .._codes import (AWQ_OUTPUTS, AWQ_PLACES, ONLY_GROUP, codes_of_pairs, codes_of_words, pairs_of_codes, turned,
                      words_of_codes)
from .._layer_form import WIDE_SCALES
from .._ops.packed import format_of
from ..nn import QuantLinear
from .analytic import INTEGERS, Trace
from .fp8_experts import is_fp8_experts, patch_fp8_experts
from .fp8_linear import drop_merged_fp8, is_fp8_linear, is_static_fp8_linear, patch_fp8_linear
from .recognise import (CodedLayer, Numbers, PatchReport, Unfit, expect_pieces, has_kernels, is_close, is_patched,
                        reason_of, try_to, undoable, view_of)
from .trial import hidden, replace_forward

# The codes of a layer [n, k], from the words that it has and back. (A word has eight, so the last one
# may be padded.)
def _gptq_codes(words: Tensor, n: int, k: int) -> Tensor:
    return codes_of_words(words, k, 0).t()


def _gptq_words(codes: Tensor) -> Tensor:
    return words_of_codes(codes.t(), 0)


def _awq_codes(words: Tensor, n: int, k: int) -> Tensor:
    return turned(codes_of_words(words, n, 1), AWQ_PLACES).t()


def _awq_words(codes: Tensor) -> Tensor:
    return words_of_codes(turned(codes.t(), AWQ_OUTPUTS), 1)


def _row_codes(words: Tensor, n: int, k: int) -> Tensor:
    return codes_of_words(words, k, 1)


def _row_words(codes: Tensor) -> Tensor:
    return words_of_codes(codes, 1)


# Codes of 8 bits: four in a word, plus 128, or each as it is.
def _byte_codes(words: Tensor, n: int, k: int) -> Tensor:
    return (words.contiguous().view(torch.uint8)[:, :k] ^ 128).contiguous()


def _byte_words(codes: Tensor) -> Tensor:
    return F.pad(codes ^ 128, (0, -codes.shape[1] % 4)).view(torch.int32)


def _plain_bytes(weight: Tensor, n: int, k: int) -> Tensor:
    return weight.contiguous().view(torch.uint8)


_FORMATS = {"GPTQ": (_gptq_codes, _gptq_words), "AWQ": (_awq_codes, _awq_words),
            "compressed-tensors": (_row_codes, _row_words),
            "compressed-tensors of 8 bits": (_byte_codes, _byte_words),
            "compressed-tensors of e2m1": (lambda pairs, n, k: codes_of_pairs(pairs, k), pairs_of_codes),
            "compressed-tensors of int8": (_plain_bytes, lambda codes: codes.view(torch.int8)),
            "compressed-tensors of fp8": (_plain_bytes, lambda codes: codes.view(torch.float8_e4m3fn)),
            "FP8Linear": (_plain_bytes, lambda codes: codes.view(torch.float8_e4m3fn))}


class _Layer(NamedTuple):
    """The contents of a module's tensors: q, scale and zero are [n, k] and [n, groups]. q has a code in
    each byte."""

    format: str
    name: str  # of the tensor with codes
    n: int
    k: int
    q: Tensor
    scale: Tensor
    zero: Tensor | None  # of 8
    groups: Tensor  # [k]
    code: str = "int4"  # of PackedWeight
    whole: Tensor | None = None  # nvfp4: what divides all scales


@dataclass(frozen=True)
class Quantised(CodedLayer):
    """A layer with a packed weight, and how its codes were saved."""

    format: str
    name: str
    group: int
    code: str
    activations: object = None  # compressed-tensors' arguments by which x is rounded


_OWN = ("_fftune_w", "_fftune_scale", "_fftune_zero", "_fftune_order")
_OF_FFTUNE = "fftune"
_NOT_FINITE = "its scales are not finite"
_METHODS = ("_save_to_state_dict", "_load_from_state_dict")
_SCHEME = ("quantization_scheme", "quantization_status")


def _as_packed(scale: Tensor, code: str) -> Tensor:
    """Scales in a type that packed weights have: module.to(dtype) gives them that of the model."""
    return scale.float() if scale.dtype == torch.float64 or code in WIDE_SCALES else scale


def packed_of(module: nn.Module) -> ops.PackedWeight:
    """The weight of a replaced layer; its columns are in the order of _fftune_order, if it has one."""
    layer, = module._fftune
    w, scale, zero = (getattr(module, name) for name in _OWN[:3])
    scale = _as_packed(scale, layer.code)
    if "_fftune_shared" in module.__dict__:
        owner, rows, name = module.__dict__["_fftune_shared"]
        blocks = -(-layer.k // 64) * (2 if layer.code in WIDE_SCALES else 1)
        w = torch.cat((w, owner._buffers[name][1 + rows[0] // 16 * blocks:1 + rows[1] // 16 * blocks]))
    return ops.PackedWeight(w, scale, zero, layer.n, layer.k, layer.group, layer.code)


# Tensors that only modules with codes have: linear layers, and transformers' FP8Experts.
_CODES = ("qweight", "weight_packed", "weight_scale_inv", "weight_scale", "gate_up_proj_scale_inv",
          "up_proj_scale_inv")


def has_codes(module: nn.Module) -> bool:
    """Whether it is a layer with codes, replaced or not."""
    return type(module) is QuantLinear or any(name in tensors for name in _CODES for tensors in (module._buffers, module._parameters)
               ) or _is_of_bitsandbytes(module)


def _is_of_bitsandbytes(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear8bitLt", "Linear4bit") and type(module).__module__.startswith(
        "bitsandbytes")


def is_quantised(module: nn.Module | None) -> bool:
    """Whether it is a replaced layer that computes x W^T + b, without rounding x."""
    return is_patched(module, quantised_forward) or is_patched(module, quant_linear_forward)


# what the modules have

def _attribute(module: nn.Module, *names: str):
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _expect_shape(module: nn.Module, name: str, *shapes: tuple[int, ...]) -> None:
    tensor = getattr(module, name)
    if tuple(tensor.shape) not in shapes:
        raise Unfit(f"{name} is {[*tensor.shape]}, not {' or '.join(str([*s]) for s in shapes)}")


def _expect_words(module: nn.Module, *names: str) -> None:
    for name in names:
        tensor = getattr(module, name, None)
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32 or tensor.dim() != 2 \
                or tensor.device.type not in ("cpu", "cuda"):
            raise Unfit(f"{name} is no tensor of int32 words on a CPU or GPU")


def _without_eights(zero: Tensor) -> Tensor | None:
    return None if bool((zero == 8).all()) else zero


def _groups_of(index: Tensor | None, k: int, count: int, size: int | None, device) -> Tensor:
    if index is None:
        size = size or -(-k // count)
        if -(-k // size) != count:
            raise Unfit(f"{k} inputs in groups of {size} have {-(-k // size)} scales, not {count}")
        return torch.arange(k, device=device) // size
    if count == 1:
        return torch.zeros(k, dtype=torch.int64, device=device)
    if index.shape != (k,) or bool(((index < 0) | (index >= count)).any()):
        raise Unfit(f"the index of groups is not one of {count} for each of {k} inputs")
    return index.long()


def _candidates(module: nn.Module) -> list[_Layer]:
    """The layers that the tensors of GPTQ or AWQ may mean."""
    _expect_words(module, "qweight", "qzeros")
    scales = module.scales
    if scales.dim() != 2:
        raise Unfit(f"scales are {[*scales.shape]}, not [groups, outputs]")
    if not bool(scales.isfinite().all()):  # before its own results are compared
        raise Unfit(_NOT_FINITE)
    count, n = scales.shape
    index = _attribute(module, "g_idx")
    index = index if isinstance(index, Tensor) and index.numel() else None
    k = _attribute(module, "in_features", "infeatures") or (
        index.numel() if index is not None else module.qweight.shape[0])
    if n != (_attribute(module, "out_features", "outfeatures") or n):
        raise Unfit(f"scales are of {n} outputs, where the layer has {module.out_features}")
    size = _attribute(module, "group_size")
    size = k if size == -1 else size
    shape = tuple(module.qweight.shape)
    layers = []
    if shape == (k, n // 8) and n % 8 == 0:
        _expect_shape(module, "qzeros", (count, n // 8))
        zero = turned(codes_of_words(module.qzeros, n, 1), AWQ_PLACES).t()
        layers.append(("AWQ", zero, None))
    if shape == (-(-k // 8), n):
        _expect_shape(module, "qzeros", (count, -(-n // 8)))
        # The second version keeps zero points, the first one less than that, of the whole word.
        version = getattr(module, "qzero_format", lambda: None)()
        for own, words in ((1, module.qzeros + 0x11111111), (2, module.qzeros)):
            if version in (None, own):
                layers.append(("GPTQ", codes_of_words(words, n, 1).t(), index))
    if not layers:
        raise Unfit(f"qweight is {[*shape]}: no layout of {n} outputs and {k} inputs with 4 bits that "
                    "is known")
    return [_Layer(format, "qweight", n, k, _FORMATS[format][0](module.qweight, n, k), scales.t(),
                   _without_eights(zero), _groups_of(own, k, count, size, scales.device))
            for format, zero, own in layers]


def _word(value):
    """The text of a member of an enumeration."""
    return getattr(value, "value", value)


def _expect_scheme(module: nn.Module) -> tuple[str, int]:
    """That the scheme of compressed-tensors is one that kernels have; kind and bits of the weights."""
    scheme = getattr(module, "quantization_scheme", None)
    weights = getattr(scheme, "weights", None)
    if _word(getattr(module, "quantization_status", None)) != "compressed" or weights is None:
        raise Unfit("weight_packed without a scheme that says what it is")
    if getattr(scheme, "output_activations", None) is not None:
        raise Unfit("its results are quantised, for which there is no kernel")
    bits, kind = weights.num_bits, _word(weights.type)
    if (kind, bits) not in (("float", 4), ("float", 8)) and (
            kind != "int" or bits not in (4, 8) or bits == 8 and not weights.symmetric):
        raise Unfit(f"its weights are {kind}{bits}{'' if weights.symmetric else ' with zero points'}, for "
                    "which there is no kernel")
    if getattr(scheme, "input_activations", None) is not None:
        _rounding(module)
    return kind, bits


def _rounding(module: nn.Module):
    """compressed-tensors' own function that rounds activations."""
    try:
        from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    except ImportError:
        raise Unfit("its activations are quantised, and compressed-tensors has no forward_quantize") from None
    return forward_quantize


def _compressed_e2m1(module: nn.Module) -> _Layer:
    """nvfp4 or mxfp4, two codes in a byte."""
    pairs, scale, whole = (_attribute(module, f"weight_{name}") for name in ("packed", "scale", "global_scale"))
    code = {torch.float8_e4m3fn: "nvfp4", torch.uint8: "mxfp4"}.get(scale.dtype)
    if code is None or pairs.dtype != torch.uint8 or (code == "nvfp4") != (whole is not None and whole.numel() == 1):
        raise Unfit(f"weight_packed of {pairs.dtype} with weight_scale of {scale.dtype} is neither nvfp4 nor mxfp4")
    (n, k), group = (pairs.shape[0], 2 * pairs.shape[1]), ONLY_GROUP[code]
    _expect_shape(module, "weight_scale", (n, k // group))
    if k % group or whole is not None and not bool(whole.isfinite() & (whole != 0)):
        raise Unfit(f"groups of {group} do not divide {k} inputs, or weight_global_scale is no number to divide by")
    return _Layer("compressed-tensors of e2m1", "weight_packed", n, k, codes_of_pairs(pairs, k), scale, None,
                  _groups_of(None, k, scale.shape[1], group, scale.device), code, whole)


def _compressed_fp8(module: nn.Module) -> _Layer:
    args = module.quantization_scheme.weights
    block = getattr(args, "block_structure", None)
    return _fp8(module, "weight_scale", block if _word(args.strategy) == "block" else None)


def _fp8(module: nn.Module, name: str, block) -> _Layer:
    """Scales of the tensor, of rows or of blocks."""
    weight, scale = module.weight, getattr(module, name).float()
    if weight.dtype != torch.float8_e4m3fn:
        raise Unfit(f"its weight is {str(weight.dtype)[6:]}, not float8_e4m3fn")
    n, k = weight.shape
    rows, size = block or (1 if scale.numel() == n else n, k)
    if scale.numel() != -(-n // rows) * -(-k // size):
        raise Unfit(f"{name} is {[*scale.shape]}, not of blocks of {rows} by {size}")
    scale = scale.reshape(-(-n // rows), -1).repeat_interleave(rows, 0)[:n]
    if bool(weight.float().isnan().any()):
        raise Unfit("its weight has NaN")
    return _Layer("compressed-tensors of fp8", "weight", n, k, _plain_bytes(weight, n, k), scale, None,
                  _groups_of(None, k, scale.shape[1], size, scale.device), "fp8")


def _static_fp8(module: nn.Module) -> _Layer | None:
    """transformers' FP8Linear whose activations are divided by a scale that it was given. The scales of the
    weight become those of the products."""
    if module.weight.dtype != torch.float8_e4m3fn:
        return None
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    block = module.block_size and tuple(module.block_size)
    if block in (None, tuple(module.weight.shape)):
        raise Unfit("its weight has one scale: kernels then leave activation_scale unread, or read it")
    by = module.activation_scale
    if by is None or by.numel() != 1 or not bool(by.float().isfinite() & (by > 0)):
        raise Unfit("its activation_scale is no positive number")
    layer = _fp8(module, "weight_scale_inv", block)
    return layer._replace(format="FP8Linear", scale=layer.scale * by.float())


def _compressed(module: nn.Module) -> _Layer:
    kind, bits = _expect_scheme(module)
    if _attribute(module, "weight_scale") is None:
        raise Unfit("it has no weight_scale")
    forward = module.__dict__.get("forward")
    # Its __module__ is that of the forward which it wraps.
    where = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
    if forward is not None and not where.startswith("compressed_tensors."):
        raise Unfit("its forward was replaced already")
    # That of a subclass may compute something else with the weight.
    if type(module).forward is not nn.Linear.forward and not type(module).__module__.startswith(
            "compressed_tensors."):
        raise Unfit(f"{type(module).__name__} has a forward of its own")
    if kind == "float":
        return _compressed_e2m1(module) if bits == 4 else _compressed_fp8(module)
    if getattr(module, "weight_packed", None) is None:
        format, name = "compressed-tensors of int8", "weight"
        n, k = module.weight.shape
    else:
        format, name = "compressed-tensors" + (" of 8 bits" if bits == 8 else ""), "weight_packed"
        _expect_words(module, name)
        n, k = module.weight_shape.tolist()
        _expect_shape(module, name, (n, -(-k * bits // 32)))
    scale = module.weight_scale
    scale = scale.expand(n, 1) if scale.numel() == 1 else scale
    if scale.dim() != 2 or scale.shape[0] != n:
        raise Unfit(f"weight_scale is {[*scale.shape]}, not [{n}, groups]")
    count, zero = scale.shape[1], None
    if getattr(module, "weight_zero_point", None) is not None:
        _expect_words(module, "weight_zero_point")
        _expect_shape(module, "weight_zero_point", (-(-n // 8), count))
        zero = _without_eights(codes_of_words(module.weight_zero_point, n, 0))
    elif not module.quantization_scheme.weights.symmetric:
        raise Unfit("its weights have zero points, but there is no weight_zero_point")
    size = getattr(module.quantization_scheme.weights, "group_size", None)
    return _Layer(format, name, n, k, _FORMATS[format][0](getattr(module, name), n, k), scale, zero,
                  _groups_of(_attribute(module, "weight_g_idx"), k, count,
                             size if size and size > 0 else None, scale.device),
                  "int4" if bits == 4 else "int8")


# what their forward computes

def _dense(layer: _Layer, columns: Tensor) -> Tensor:
    """Columns of the weight, float32 [n, columns]."""
    at = layer.groups[columns]
    zero = 8.0 if layer.zero is None else layer.zero[:, at].float()
    return (layer.q[:, columns].float() - zero) * layer.scale[:, at].float()


_PACKAGES = ("gptqmodel", "auto_gptq", "awq", "optimum", "transformers")  # whose kernels are known


def _agrees(module: nn.Module, layer: _Layer) -> bool:
    """Whether the module's own forward multiplies by that weight. Each group has a row of a single
    one, which shows its codes and scales; random rows show all others."""
    device, dtype = layer.scale.device, layer.scale.dtype
    bare = view_of(module, {})
    for tensors in ("_buffers", "_parameters"):
        own = dict(module.__dict__[tensors])
        if "bias" in own:
            own["bias"] = None
        bare.__dict__[tensors] = own
    order = torch.argsort(layer.groups, stable=True)
    begins = F.pad(layer.groups[order].diff(), (1, 0), value=1) != 0
    firsts = torch.cat((order[begins], torch.arange(0, layer.k, -(-layer.k // 64), device=device)))
    x = torch.zeros(len(firsts), layer.k, dtype=dtype, device=device)
    x[torch.arange(len(firsts), device=device), firsts] = 1
    ours = _dense(layer, firsts).t()
    step = layer.scale[:, layer.groups[firsts]].t().float().abs()
    if bool(((type(module).forward(bare, x).float() - ours).abs() > step / 4).any()):
        return False
    x = Numbers(0)(4, layer.k).to(device, dtype)
    with Trace((INTEGERS,)) as trace:
        theirs = type(module).forward(module, x)
    subject = type(module).__name__
    expect_pieces(trace, None, subject)
    if not trace.products and type(module).__module__.partition(".")[0] not in _PACKAGES:
        raise Unfit(f"{subject} multiplies by a kernel that PyTorch does not see")
    ours = x.float() @ _dense(layer, torch.arange(layer.k, device=device)).t()
    if getattr(module, "bias", None) is not None:
        ours += module.bias.float()
    return is_close(ours, theirs, 8 * torch.finfo(dtype).eps)


def _recognised(module: nn.Module) -> _Layer | None:
    has = {**module._buffers, **module._parameters}
    if has.get("weight_packed") is not None and (has.get("weight_shape") is not None or hasattr(
            module, _SCHEME[0])):
        return _compressed(module)
    weight = has.get("weight")
    if weight is not None and weight.dtype in (torch.int8, torch.float8_e4m3fn) and has.get(
            "weight_scale") is not None and hasattr(module, _SCHEME[0]):
        return _compressed(module)
    if _is_of_bitsandbytes(module):
        raise Unfit("bitsandbytes rounds activations to int8 but for outliers" if type(
            module).__name__ == "Linear8bitLt" else "bitsandbytes' weights of 4 bits have no kernel")
    if any(has.get(name) is None for name in ("qweight", "scales", "qzeros")):
        if has_codes(module):
            raise Unfit(f"{type(module).__name__} has codes in a layout for which there is no kernel")
        return None
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    if _attribute(module, "bits", "w_bit") not in (None, 4):
        raise Unfit(f"its weights have {_attribute(module, 'bits', 'w_bit')} bits, for which there is no "
                    "kernel")
    if _attribute(module, "adapter") is not None:
        raise Unfit("it has an adapter")
    candidates, agree = _candidates(module), []
    with torch.no_grad(), torch.autocast(candidates[0].scale.device.type, enabled=False):
        try:
            agree = [layer for layer in candidates if _agrees(module, layer)]
        except Exception as error:
            raise Unfit(f"its forward cannot be compared: {reason_of(error)}") from None
    if not agree:
        raise Unfit(f"{type(module).__name__} does not compute what its tensors say: a kernel may have "
                    "reordered them")
    return agree[0]


# what comes in their place

def _packed_group(layer: _Layer) -> tuple[int, Tensor | None, Tensor]:
    """The group of the packed weight, the order of its columns if it is another, and the group of
    the layer for each of its own."""
    groups, order = layer.groups, None
    count = layer.scale.shape[1]
    if layer.code in ONLY_GROUP:
        return ONLY_GROUP[layer.code], None, torch.arange(count, device=groups.device)
    if count == 1:
        return 0, None, torch.zeros(1, dtype=torch.int64, device=groups.device)
    if bool((groups[1:] < groups[:-1]).any()):
        order = torch.argsort(groups, stable=True)
        groups = groups[order]
    for group in (128, 64, 32):
        if layer.k % group == 0 and bool((groups.view(-1, group) == groups[::group, None]).all()):
            return group, order, groups[::group]
    raise Unfit(f"{count} groups of {layer.k} inputs: groups that kernels have are multiples of 32")


def _as_type(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales for x of this type, not rounded by more than bfloat16 has."""
    own = scale.to(dtype)
    if bool(((own.double() - scale.double()).abs() > scale.double().abs() / 256).any()):
        raise Unfit(f"its scales of {str(scale.dtype)[6:]} do not fit {str(dtype)[6:]}")
    return own


def _patch(module: nn.Module, dtype: torch.dtype | None, known: dict) -> str | None:
    static = is_static_fp8_linear(module)
    if is_fp8_linear(module) and not static:
        return patch_fp8_linear(module, dtype, known)
    if type(module) is QuantLinear:
        return _patch_quant_linear(module, dtype, known)
    if is_fp8_experts(module):
        return patch_fp8_experts(module, dtype, known)
    layer = _static_fp8(module) if static else _recognised(module)
    if layer is None:
        return None
    if not bool(layer.scale.float().isfinite().all()):
        raise Unfit(_NOT_FINITE)
    group, order, groups = _packed_group(layer)
    dtype = dtype or (torch.bfloat16 if layer.code in ONLY_GROUP else layer.scale.dtype)
    if dtype == torch.float16 and layer.scale.device.type == "cpu":
        dtype = torch.float32
    scale = layer.scale.contiguous() if layer.code in ONLY_GROUP else _as_type(
        layer.scale[:, groups], torch.float32 if layer.code in WIDE_SCALES else dtype).contiguous()
    if layer.whole is not None:
        scale = scale, 1 / layer.whole.float()
    zero = None if layer.zero is None else layer.zero[:, groups].contiguous()
    to_words = _FORMATS[layer.format][1]
    tensors = module._parameters if layer.name in module._parameters else module._buffers
    if layer.name != "weight" and not torch.equal(to_words(layer.q), tensors[layer.name]):
        raise Unfit(f"{layer.name} has bits behind its last input")
    q = (layer.q if order is None else layer.q[:, order]).contiguous()
    packed = ops.pack_weight(q if layer.code in WIDE_SCALES else pairs_of_codes(q), scale, zero, k=layer.k,
                             group=group, format=layer.code)
    # Model hooks of compressed-tensors make dense what has a scheme.
    kept = {name: module.__dict__.pop(name) for name in (*_SCHEME, "forward") if name in module.__dict__}
    module.__dict__["_fftune_kept"] = kept
    tensors[layer.name] = None
    activations = getattr(kept.get(_SCHEME[0]), "input_activations", None)
    form = Quantised(layer.n, layer.k, dtype, layer.format, layer.name, group, layer.code, activations)
    forward = static_forward if static else quantised_forward if activations is None else rounded_forward
    _run_packed(module, form, (*packed[:3], order), forward, _save, known)
    groups = f"groups of {group}" if group else "a group a row"
    return (f"{type(module).__name__} by linear with a packed weight ({layer.format}, {groups}"
            f"{', in the order of its groups' if order is not None else ''}"
            f"{', rounded activations' if static or activations is not None else ''})")


def _run_packed(module: nn.Module, form: Quantised, packed, forward, save, known: dict) -> None:
    """Replaces the forward of a module that no longer has its own tensors, or gives these back."""
    for name, tensor in zip(_OWN, packed):
        module.register_buffer(name, tensor, persistent=False)
    try:
        replace_forward(module, forward, (form,), hidden(form.k), known)
    except Unfit:
        module.__dict__["_fftune"] = form,
        restore_quantised(module)
        raise
    for name, method in zip(_METHODS, (save, _load)):
        module.__dict__[name] = types.MethodType(method, module)


# This library's own layer. Its tensors have the names of those of other replaced layers meanwhile.
_TENSORS = ("packed", "scale", "zero")


def _patch_quant_linear(module: QuantLinear, dtype: torch.dtype | None, known: dict) -> str:
    if "forward" in module.__dict__:
        raise Unfit("its forward was replaced already")
    if module.packed.is_meta:
        raise Unfit("its weight has no values yet: it is on the meta device")
    dtype = module.scale.dtype if module.format == "int4" else dtype or torch.bfloat16
    form = Quantised(module.out_features, module.in_features, dtype, _OF_FFTUNE, "packed", module.group, module.format)
    packed = *module.packed_weight[:3], None
    module.__dict__["_fftune_kept"] = {}
    _put_back_own(module, (None, None, None))
    _run_packed(module, form, packed, quant_linear_forward, _save_own, known)
    module.__dict__["_apply"] = types.MethodType(_apply_to_own, module)
    return f"QuantLinear by linear with a packed weight ({module.format})"


def _put_back_own(module: QuantLinear, tensors) -> None:
    module._buffers.update(zip(_TENSORS, tensors))


def _save_own(self, destination, prefix, keep_vars) -> None:
    _put_back_own(self, packed_of(self)[:3])
    try:
        type(self)._save_to_state_dict(self, destination, prefix, keep_vars)
    finally:
        _put_back_own(self, (None, None, None))


def _apply_to_own(self, function, *arguments):
    """As the layer's own, which keeps the scales of most formats as they are: .to(dtype) is for the tokens' type."""
    before = packed_of(self)[1]
    keeps = before.is_floating_point() and self.format != "int4" \
        and function(before.new_empty(0)).dtype != before.dtype
    if keeps and "_fftune_shared" in self.__dict__:
        split_off(self)
    type(self)._apply(self, function, *arguments)
    if keeps:
        self._buffers[_OWN[1]] = before.to(self._buffers[_OWN[0]].device)
    return self


def patch_quantised(model: nn.Module, report: PatchReport, known: dict) -> None:
    """All layers of a model, in whose type their scales are kept."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() and
                  p.dtype in (torch.float32, torch.bfloat16, torch.float16)), None)
    with torch.no_grad():  # scales may be parameters
        for name, module in model.named_modules():
            try_to(report, name, lambda: _patch(module, dtype, known))
    _keep_from_becoming_dense(model, report)


_HOOK = "ct_decompress_hook"


def _keep_from_becoming_dense(model: nn.Module, report: PatchReport) -> None:
    """compressed-tensors makes all its layers dense in the first call of a model, by a hook. It is kept
    until unpatch() where all layers were replaced; else it has to have them all."""
    hook = getattr(model, _HOOK, None)
    ours = {name: m for name, m in model.named_modules()
            if (is_quantised(m) or is_patched(m, rounded_forward))
            and m._fftune[0].format.startswith("compressed-tensors")}
    if hook is None or not ours:
        return
    if not any(hasattr(m, _SCHEME[0]) for m in model.modules()):
        model.__dict__["_fftune_hook"] = model._forward_pre_hooks.pop(hook.id)
        return
    for module in ours.values():
        restore_quantised(module)
    report.replaced[:] = [entry for entry in report.replaced if entry[0] not in ours]
    report.left.extend((name, "other layers of the model have no kernel, and compressed-tensors makes all "
                        "dense together") for name in ours)


def _words(module: nn.Module) -> Tensor:
    """The codes as they were saved."""
    layer, = module._fftune
    codes = packed_of(module).unpack()[0]
    if layer.code not in WIDE_SCALES:
        codes = codes_of_pairs(codes, layer.k)
    if module._fftune_order is not None:
        codes = codes[:, torch.argsort(module._fftune_order)]
    return _FORMATS[layer.format][1](codes).contiguous()


def _put_back(module: nn.Module, words: Tensor | None) -> None:
    name = module._fftune[0].name
    if name in module._parameters:
        module._parameters[name] = None if words is None else nn.Parameter(words, requires_grad=False)
    else:
        module._buffers[name] = words


def _save(self, destination, prefix, keep_vars) -> None:
    _put_back(self, _words(self))
    try:
        type(self)._save_to_state_dict(self, destination, prefix, keep_vars)
    finally:
        _put_back(self, None)


def _load(self, *arguments) -> None:
    restore_quantised(self)
    type(self)._load_from_state_dict(self, *arguments)


def restore_quantised(module: nn.Module) -> None:
    """Takes back what patch_quantised() did to a module."""
    if "_fftune_hook" in module.__dict__:
        module._forward_pre_hooks[getattr(module, _HOOK).id] = module.__dict__.pop("_fftune_hook")
    if "_fftune_kept" not in module.__dict__:
        return
    with torch.no_grad():
        if type(module) is QuantLinear:
            _put_back_own(module, packed_of(module)[:3])
        else:
            _put_back(module, _words(module))
    for name in _OWN:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
    for name in (*_METHODS, "_apply", "forward", "_fftune", "_fftune_parts", "_fftune_settings", "_fftune_shared"):
        module.__dict__.pop(name, None)
    module.__dict__.update(module.__dict__.pop("_fftune_kept"))


# several layers in one: q, k and v, or a layer of each expert

_PARTS = ("qkv", "gate", "up", "down")


def _merged_names(part: str) -> list[str]:
    return [f"_fftune_{part}_{tensor}" for tensor in ("w", "scale", "zero", "bias")]


def merge(owner: nn.Module, layers: list[nn.Module], part: str = "qkv") -> None:
    """Gives the module one packed weight of all rows of these layers, and one bias. They keep their
    headers, and have their blocks in there. Unfit where they do not go together."""
    names = _merged_names(part)
    if names[0] in owner._buffers:
        return
    what = "q, k and v" if part == "qkv" else f"the experts' {part}"
    weights, biases = list(map(packed_of, layers)), [layer.bias for layer in layers]
    first, order = weights[0], layers[0]._fftune_order
    if any(w.n % 16 or (w.k, *format_of(w), w.scale.dtype) != (first.k, *format_of(first), first.scale.dtype)
           for w in weights):
        raise Unfit(f"{what} have packed weights of different formats")
    if any((layer._fftune_order is None) != (order is None) or order is not None
           and not torch.equal(layer._fftune_order, order) for layer in layers):
        raise Unfit(f"the groups of {what} have different orders")
    if len({bias is None for bias in biases}) > 1:
        raise Unfit(f"some of {what} have a bias, and some have none")
    header = first.w[:1].clone()
    header.view(torch.int32)[0, 2] = sum(w.n for w in weights)
    merged = [torch.cat((header, *(w.w[1:] for w in weights))), torch.cat([w.scale for w in weights]),
              None if first.zero is None else torch.cat([w.zero for w in weights]),
              None if biases[0] is None else torch.cat([
                  b.to(first.scale.dtype) if first.format == "int4" else b for b in biases])]
    for name, tensor in zip(names, merged):
        owner.register_buffer(name, None if tensor is None else tensor.detach(), persistent=False)
    start = 0
    for layer, w in zip(layers, weights):
        layer._buffers[_OWN[0]] = w.w[:1].clone()
        for name, tensor in zip(_OWN[1:3], merged[1:3]):
            layer._buffers[name] = None if tensor is None else tensor[start // 16:(start + w.n) // 16]
        layer.__dict__["_fftune_shared"] = owner, (start, start + w.n), names[0]
        start += w.n


def merged_of(owner: nn.Module, layers: list[nn.Module], part: str = "qkv"
              ) -> tuple[ops.PackedWeight, Tensor | None] | None:
    """The weight and bias of the layers together; None where they are not, or no longer, together."""
    names = _merged_names(part)
    if owner._buffers.get(names[0]) is None or not all(
            is_quantised(layer) and layer.__dict__.get("_fftune_shared", (None,))[0] is owner
            for layer in layers):
        return None
    w, scale, zero, bias = (owner._buffers[name] for name in names)
    format = layers[0]._fftune[0]
    n = sum(layer._fftune[0].n for layer in layers)
    return ops.PackedWeight(w, _as_packed(scale, format.code), zero, n, format.k, format.group, format.code), bias


def take_apart(owner: nn.Module, layers: list[nn.Module]) -> None:
    """Takes back merge() where the layers stay replaced."""
    for layer in layers:
        if layer.__dict__.get("_fftune_shared", (None,))[0] is owner:
            split_off(layer)
    restore_merged(owner)


def split_off(layer: nn.Module) -> None:
    """Gives a layer its own weight, which was some rows of a merged one."""
    layer._buffers.update(zip(_OWN, (None if t is None else t.clone() for t in packed_of(layer)[:3])))
    del layer.__dict__["_fftune_shared"]


def restore_merged(owner: nn.Module) -> None:
    """Takes back what merge() gave, after the layers were restored."""
    drop_merged_fp8(owner)
    for name in itertools.chain(*map(_merged_names, _PARTS)):
        if name in owner._buffers:
            del owner._buffers[name]
            owner._non_persistent_buffers_set.discard(name)


# what runs

def ordered(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs in the order of the packed columns."""
    return x if module._fftune_order is None else x.index_select(-1, module._fftune_order)


def numbers_of(module: nn.Module) -> Tensor:
    """A tensor of the type and device of what the layer computes."""
    return module._fftune_scale.new_empty(0, dtype=module._fftune[0].dtype)


def fits(packed: ops.PackedWeight, x: Tensor) -> bool:
    """Whether the scales are for x of its type."""
    return packed.format != "int4" or packed.scale.dtype == x.dtype


def quantised_linear(module: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    x, packed, bias = ordered(module, x), packed_of(module), module.bias
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if fits(packed, x) and has_kernels(x):
        return ops.linear(x, packed, bias, residual)
    y = F.linear(x, packed.dense(x.dtype), bias)
    return y if residual is None else y + residual


@undoable
def quantised_forward(self, x: Tensor, *_, **__) -> Tensor:
    return quantised_linear(self, x)


@undoable
def quant_linear_forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return quantised_linear(self, x, residual)


class _Rounded(torch.autograd.Function):
    """x over a scale as numbers of e4m3. The gradient is that of the layer's own backward pass, as if nothing
    was rounded."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        scale, = ctx.saved_tensors
        return (dy / scale).to(dy.dtype), None


@undoable
def static_forward(self, input: Tensor) -> Tensor:
    return quantised_linear(self, _Rounded.apply(input, self.activation_scale.detach().float()))


@undoable
def rounded_forward(self, x: Tensor, *_, **__) -> Tensor:
    kept, (layer,) = self._fftune_kept, self._fftune
    if getattr(self, "quantization_enabled", True):
        # It reads the scales of x, or makes them.
        own = types.SimpleNamespace(quantization_status=kept[_SCHEME[1]], **{
            name: value for name in ("input_scale", "input_zero_point", "input_global_scale")
            if (value := getattr(self, name, None)) is not None})
        x = _rounding(self)(own, x, "input", layer.activations)
    return quantised_linear(self, x)
