"""Checks of the arguments of ops: element types, dimensions and shapes of tensors, types of
options.

The library sees addresses alone, so everything is checked here, in three places. PyTorch's schema
of the op checks the types of arguments: call() in _custom.py goes past it only with arguments of
the right types. Where a plan is new, and in fake kernels, check_tensors() checks element types and
dimensions by the table TENSORS; what shapes have in common is checked by the op's Form. The cause
of a failure before that is found by explain().
"""
import math
from dataclasses import dataclass
from typing import Iterable, Sequence

import torch
from torch import Tensor

from ._library import Error, on_two_devices

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32",
               torch.float8_e4m3fn: "fp8"}
_FP8, _F32, _I32 = (frozenset((t,)) for t in (torch.float8_e4m3fn, torch.float32, torch.int32))
_FLOATS = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_INDICES = frozenset((torch.int64, torch.int32))
_MASKS = frozenset((torch.bool, torch.uint8))
_BYTES = frozenset((torch.bool, torch.uint8, torch.int8))
# All tensors of this kind have one type, that of the problem.
_DATA = frozenset(DTYPE_NAMES) - _FP8


@dataclass(frozen=True)
class _Kind:
    """Element types that an argument may have, and its dimensions in words: "..." is any, also
    none."""

    types: frozenset
    shape: str

    @property
    def one_type(self) -> bool:
        return self.types is _DATA


def _kinds(types: frozenset, **shapes: str) -> dict[str, _Kind]:
    return {name.replace("__", "."): _Kind(types, shape) for name, shape in shapes.items()}


# By the names that the tensors have in the schemas of the ops and in their Forms; in front of a dot
# is the op whose tensor is another one.
TENSORS = {
    **_kinds(_DATA, x="[..., d]", residual="[..., d]", total="[..., d]", dy="[..., d]",
             dsum="[..., d]", gate="[..., h]", up="[..., h]", gate_up="[..., 2h]", y="[..., d]",
             w_norm="[d]", w_gate="[h, d]", w_up="[h, d]", w_down="[d, h]", bias="[d]", b_up="[h]",
             b_down="[d]", w="[n, k]", w_true="[n, k]", w_false="[n, k]", w_gate_true="[h, d]",
             w_up_true="[h, d]", w_down_true="[d, h]", w_gate_false="[h, d]", w_up_false="[h, d]",
             w_down_false="[d, h]", w_q="[rows, d]", w_k="[rows, d]", w_v="[rows, d]", b_q="[rows]",
             b_k="[rows]", b_v="[rows]", q_norm="[features]", k_norm="[features]",
             k_cache="[..., kv_heads, features]", v_cache="[..., kv_heads, features]",
             logits="[..., experts]", dw="[n, k]", dbias="[n]", d_true="[n, k]", d_false="[n, k]",
             d_gate="[h, d]", d_up="[h, d]", d_down="[d, h]", d_gate_true="[h, d]",
             d_up_true="[h, d]", d_down_true="[d, h]", d_gate_false="[h, d]", d_up_false="[h, d]",
             d_down_false="[d, h]", q="[..., tokens, heads, features]",
             k="[..., tokens, heads, features]", v="[..., tokens, heads, features]",
             dq="[..., tokens, heads, features]", dk="[..., tokens, heads, features]",
             weights="[...]", caches="[batch, kv_heads, cache, features]", into="[...]",
             own="[...]", b="[d]", b_gate_up="[experts, 2h]"),
    **_kinds(_DATA, layernorm__w="[d]", linear__bias="[n]", linear__residual="[..., n]",
             linear__dy="[..., n]", masked_linear__dy="[..., n]",
             ngram_block__logits="[rows, vocabulary]", attention__y="[..., tokens, heads, features]",
             attention__dy="[..., tokens, heads, features]",
             attention__bias="[1 or batch, 1 or heads, queries, keys]",
             masked_softmax__x="[batch, heads, queries, keys]",
             masked_softmax__y="[batch, heads, queries, keys]",
             masked_softmax__dy="[batch, heads, queries, keys]", act_mul__dy="[..., h]",
             bias_gelu__x="[..., h]", bias_gelu__dy="[..., h]", layer__x="[batch, tokens, features]",
             moe_ffn__w_gate="[experts, h, d]", moe_ffn__w_up="[experts, h, d]",
             moe_ffn__w_down="[experts, d, h]", moe_ffn__b_down="[experts, d]",
             moe_ffn__gate="[tokens * k, h]", moe_ffn__up="[tokens * k, h]",
             moe_ffn__d_gate="[experts, h, d]", moe_ffn__d_up="[experts, h, d]",
             moe_ffn__d_down="[experts, d, h]"),
    **_kinds(_FLOATS, rmsnorm__w="[d]", bias_gelu__bias="[h]", sinks="[heads]",
             moe_route__bias="[experts]", d_weights="[..., k]", moe_ffn__weights="[..., k]",
             moe_ffn_fp8__weights="[..., k]",
             # Those of a layer are checked one by one, by its form.
             layer__weights="[...]", layer__own="[...]"),
    **_kinds(_FP8, ffn_fp8__x="[..., d]", ffn_fp8__w_gate="[h, d]", ffn_fp8__w_up="[h, d]",
             ffn_fp8__w_down="[d, h]", moe_ffn_fp8__x="[..., d]",
             moe_ffn_fp8__w_gate="[experts, h, d]", moe_ffn_fp8__w_up="[experts, h, d]",
             moe_ffn_fp8__w_down="[experts, d, h]"),
    **_kinds(_F32, rstd="[...]", angles="[positions, rotary]", lse="[..., tokens]",
             x_scale="[...]", w_gate_scale="[...]", w_up_scale="[...]", hidden_scale="[1]",
             w_down_scale="[...]"),
    **_kinds(_INTEGERS, ids="[..., k]", starts="[batch]", offsets="[sequences + 1]",
             kv_offsets="[sequences + 1]", lengths="[batch]", pages="[batch, pages]",
             prefix_lengths="[prefixes]", ns="[rows]", positions="[...]"),
    **_kinds(_INDICES, ngram_block__ids="[rows, length]", prefix="[prefixes, length]",
             slots="[...]"),
    **_kinds(_I32, bits="[batch, 1 or heads, queries, words]", layer__slots="[batch, tokens]",
             layer__lengths="[batch]", layer__positions="[batch, tokens]"),
    **_kinds(frozenset((torch.uint8,)), flags="[batch, 1 or heads, tiles, tiles]"),
    **_kinds(_MASKS, mask="[batch, 1 or heads, queries, keys]"),
    **_kinds(_BYTES, masked_linear__mask="[...]", masked_ffn__mask="[...]"),
}
# The ops of the library that others begin with come behind those.
_HOMES = ("moe_ffn_fp8", "moe_ffn", "moe_route", "masked_linear", "masked_ffn", "masked_softmax",
          "ffn_fp8", "ffn", "mlp", "linear", "rmsnorm", "layernorm", "bias_gelu", "act_mul", "rope",
          "ngram_block", "attention", "pack_mask", "qkv", "layer")


def home_of(name: str) -> str:
    """The op of the library, as the user reads it, that the custom op is a form of."""
    name = name.removeprefix("add_")
    return next(home for home in _HOMES if name.startswith(home)).replace("_", "-")


def kind_of(home: str, name: str) -> _Kind:
    return TENSORS.get(f"{home.replace('-', '_')}.{name}") or TENSORS[name]


def _short(home: str) -> str:
    return home.removesuffix("-fp8")


def _list_of(types: frozenset) -> str:
    if types is _INTEGERS:
        return "int32 or int64"
    return " or ".join(sorted(map(str, types)))


def check_tensors(home: str, tensors: Sequence[tuple[str, Tensor | None]],
                  problem_type: torch.dtype | None = None) -> None:
    """Element types and dimensions of an op's tensors. `problem_type`: of those that have one type,
    else that of the first of them."""
    first = None
    for name, tensor in tensors:
        if tensor is None:
            continue
        kind = kind_of(home, name)
        expect_dims(_short(home), name, tensor, kind.shape)
        dtype = tensor.dtype
        if dtype not in kind.types:
            added = "; what is to be added to the scores is bias" if (
                kind.types is _MASKS and dtype.is_floating_point) else ""
            raise Error(f"{_short(home)}: {name} is {dtype}: give {_list_of(kind.types)}{added}")
        if kind.one_type:
            problem_type = problem_type or dtype
            if dtype is not problem_type:
                raise Error(f"{_short(home)}: {first or 'the first tensor'} is {problem_type}, "
                            f"{name} is {dtype}: give tensors of one type")
            first = first or name


def expect_dims(op: str, name: str, tensor: Tensor, shape: str) -> None:
    """That a tensor has the dimensions of this shape in words."""
    words = shape.strip("[]").split(", ")
    least = len(words) - ("..." in words)
    if tensor.dim() < least or tensor.dim() > least and "..." not in words:
        if words[1:] == ["tokens", "heads", "features"]:
            shape = "[batch, tokens, heads, features], or [tokens, heads, features] with offsets"
        raise Error(f"{op}: {name} is {list(tensor.shape)}: give {shape}")


def expect(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...],
           dtype: torch.dtype | None = None) -> None:
    """That a tensor has this shape, and this type where the table has no word on it."""
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape):
        raise Error(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise Error(f"{op}: {name} is {tensor.dtype}, not {dtype}")


def expect_given(op: str, **arguments) -> None:
    """That none is None, which the library would take for its own default."""
    for name, value in arguments.items():
        if value is None:
            raise Error(f"{op}: {name} is None: give a value")


def int32(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    """Ids, places or lengths as the kernels take them. A cast would make some of anything."""
    if tensor is None or tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype not in _INTEGERS:
        raise Error(f"{op}: {name} are {tensor.dtype}: give int32 or int64")
    return tensor.to(torch.int32)


def float32(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype is torch.float32:
        return tensor
    if tensor.dtype not in _FLOATS:
        raise Error(f"{op}: {name} is {tensor.dtype}: give {_list_of(_FLOATS)}")
    return tensor.float()


def expect_one_device(op: str, tensors: Iterable[Tensor]) -> None:
    devices = list(dict.fromkeys(t.device for t in tensors))
    if len(devices) > 1:
        raise on_two_devices(op, *devices[:2])


def check_number(op: str, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise Error(f"{op}: {name} is {value}: give a finite number")


# Python's types for each type of a schema.
_OPTIONS = {"str": (str,), "bool": (bool,), "int": (int, torch.SymInt),
            "float": (float, int, torch.SymFloat, torch.SymInt)}


def explain(name: str, schema, arguments: Sequence) -> Error | None:
    """The fault in the arguments of a custom op, if it is known."""
    home, tensors = home_of(name), []
    op = _short(home)
    for declared, value in zip(schema.arguments, arguments):
        of, words = declared.name, str(declared.type)
        if value is None and not words.startswith("Optional"):
            return Error(f"{op}: {of} is None: give {_article(words)}")
        if value is None:
            continue
        words = words.removeprefix("Optional[").rstrip("]")
        if words.startswith("List["):
            kind = words.removeprefix("List[")
            if not isinstance(value, (list, tuple)):
                return Error(f"{op}: {of} is {named(value)}: give a list")
            values = [(f"{of}[{i}]", one) for i, one in enumerate(value)]
        else:
            kind, values = words, [(of, value)]
        for shown, one in values:
            if kind != "Tensor":
                if not isinstance(one, _OPTIONS[kind]) or isinstance(one, bool) != (kind == "bool"):
                    return Error(f"{op}: {shown} is {named(one)}: give {_article(kind)}")
                continue
            problem = _unlike_tensor(one)
            if problem:
                return Error(f"{op}: {shown} is {problem}: give a tensor of the CPU or a GPU whose "
                             "elements are next to each other")
            tensors.append((of, one))
    try:
        expect_one_device(op, [tensor for _, tensor in tensors])
        check_tensors(home, tensors)
    except Error as error:
        return error
    return None


def expect_tensors(op: str, **named: Tensor | None) -> None:
    """Before an op computes with them itself: that these are tensors of the table."""
    if torch.compiler.is_compiling():
        return
    there = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    for name, tensor in there:
        problem = _unlike_tensor(tensor)
        if problem:
            raise Error(f"{op}: {name} is {problem}: give a tensor")
    expect_one_device(op, [tensor for _, tensor in there])
    check_tensors(op, there)


def several(op: str, name: str, value, count: int, words: str) -> tuple:
    """The given values, `count` of them, as a tuple."""
    if not isinstance(value, (list, tuple)):
        raise Error(f"{op}: {name} is {named(value)}: give {words}")
    if len(value) != count:
        raise Error(f"{op}: {name} holds {len(value)} values, not {count}: give {words}")
    return tuple(value)


def flag(op: str, name: str, value) -> bool:
    if value is True or value is False:
        return value
    raise Error(f"{op}: {name} is {named(value)}: give True or False")


def explain_rest(name: str, schema, arguments: Sequence, error: Exception) -> Error:
    """An error of what is known to be an op's own, where no argument by itself is wrong."""
    shapes = ", ".join(f"{declared.name} {list(value.shape)}"
                       for declared, value in zip(schema.arguments, arguments)
                       if isinstance(value, Tensor))
    lines = str(error).splitlines() or [""]
    return Error(f"{_short(home_of(name))}: these do not fit together: {shapes}: {lines[0]}")


def _unlike_tensor(value) -> str | None:
    if not isinstance(value, Tensor):
        return named(value)
    if value.is_nested:
        return "a nested tensor"
    if value.layout is not torch.strided:
        return f"a tensor of {value.layout}"
    if value.is_quantized:
        return "a quantised tensor"
    return None


def named(value) -> str:
    """A value that was given, in a few words."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    text = repr(value) if isinstance(value, (str, bool, int, float)) else ""
    if not text or len(text) > 40 or not text.isprintable():
        return f"of type {type(value).__name__}"
    return text


def _article(word: str) -> str:
    return {"str": "a string", "bool": "True or False", "int": "an integer",
            "float": "a number", "Tensor": "a tensor"}.get(word, "a list")
