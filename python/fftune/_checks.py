"""Checks of the arguments of ops: element types, dimensions and shapes of tensors, types of
options.

The library sees addresses alone, so everything is checked here, in three places. PyTorch's schema
of the op checks the types of arguments: call() in _custom.py goes past it only with arguments of
the right types. Where a plan is new, and in fake kernels, check_tensors() checks element types and
dimensions by the op's kinds of tensors; what shapes have in common is checked by the op's Form. The
cause of a failure before that is found by explain().
"""
import math
import os
from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ._library import Error, on_two_devices

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "f32",
               torch.float8_e4m3fn: "fp8"}
# The library's words for element types.
TORCH_DTYPES = {**{name: dtype for dtype, name in DTYPE_NAMES.items()}, "i8": torch.int8,
                "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}
FP8 = frozenset((torch.float8_e4m3fn,))
# All tensors of this kind have one type, that of the problem.
DATA = frozenset(DTYPE_NAMES) - FP8
_FLOATS = DATA | {torch.float64}
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_INT32 = torch.iinfo(torch.int32)
_MASKS = frozenset((torch.bool, torch.uint8))
# The element types of tensors, by the words of declarations: "row" and "floats" are cast to float32
# where they are of another type than the problem's, "ints" to int32.
KINDS = {"data": DATA, "row": _FLOATS, "floats": _FLOATS, "ints": _INTEGERS,
         "index": frozenset((torch.int64, torch.int32)), "mask": _MASKS,
         "bytes": _MASKS | {torch.int8}, "state": frozenset((torch.float32, torch.bfloat16)), "f32": frozenset((torch.float32,)),
         "i32": frozenset((torch.int32,)), "i64": frozenset((torch.int64,)),
         "u8": frozenset((torch.uint8,))}


@dataclass(frozen=True)
class Kind:
    """Element types that a tensor may have, and its dimensions in words: "..." is any, also none."""

    types: frozenset
    shape: str

    @property
    def one_type(self) -> bool:
        return self.types is DATA


def _list_of(types: frozenset) -> str:
    if types is _INTEGERS:
        return "int32 or int64"
    return " or ".join(sorted(map(str, types)))


def check_tensors(op: str, kinds: Mapping[str, Kind], tensors: Sequence[tuple[str, Tensor | None]],
                  problem_type: torch.dtype | None = None) -> None:
    """Element types and dimensions of an op's tensors. `problem_type`: of those that have one type,
    else that of the first of them."""
    first = None
    for name, tensor in tensors:
        if tensor is None:
            continue
        kind = kinds[name]
        expect_dims(op, name, tensor, kind.shape)
        dtype = tensor.dtype
        if dtype not in kind.types:
            added = "; what is to be added to the scores is bias" if (
                kind.types is _MASKS and dtype.is_floating_point) else ""
            raise Error(f"{op}: {name} is {dtype}: give {_list_of(kind.types)}{added}")
        if kind.one_type:
            problem_type = problem_type or dtype
            if dtype is not problem_type:
                raise Error(f"{op}: {first or 'the first tensor'} is {problem_type}, "
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


def has_sizes(value) -> bool:
    """Whether this is a tensor, and not a nested one."""
    return isinstance(value, Tensor) and not value.is_nested


def spread(mask: Tensor | None, batch: int, queries: int, keys: int) -> Tensor | None:
    """A mask of scores [batch, heads, queries, keys], as PyTorch broadcasts one that has fewer dimensions,
    or one element along a dimension. Its heads stay 1 where they are."""
    if not has_sizes(mask) or mask.dim() > 4 or mask.layout is not torch.strided:
        return mask
    mask = mask[(None,) * (4 - mask.dim())]
    full = (batch, mask.shape[1], queries, keys)
    return mask.expand([new if own == 1 else own for own, new in zip(mask.shape, full)])


def expect(op: str, name: str, tensor: Tensor | None, shape: tuple[int, ...],
           dtype: torch.dtype | None = None) -> None:
    """That a tensor has this shape, and this type where the table has no word on it."""
    if tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape):
        raise Error(f"{op}: {name} is {list(tensor.shape)}, not {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise Error(f"{op}: {name} is {tensor.dtype}, not {dtype}")


def one_scale(op: str, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[bool, tuple[Tensor, Tensor]]:
    """Whether scales of keys and values of float8_e4m3fn are those of heads, and both as tensors [scales]."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        unlike = _unlike_tensor(scale)
        if unlike or scale.dim() > 1:
            given = unlike or list(scale.shape)
            raise Error(f"{op}: {name} is {given}: give float32 [1] or [kv_heads] for keys and values of "
                        "torch.float8_e4m3fn")
    scales = k_scale.reshape(-1), v_scale.reshape(-1)
    if scales[0].shape != scales[1].shape:
        raise Error(f"{op}: k_scale is {list(k_scale.shape)}, v_scale {list(v_scale.shape)}: give one of each, or one "
                    "of each head")
    return scales[0].shape[0] != 1, scales


def expect_given(op: str, **arguments) -> None:
    """That none is None, which the library would take for its own default."""
    for name, value in arguments.items():
        if value is None:
            raise Error(f"{op}: {name} is None: give a value")


def int32(op: str, name: str, tensor: Tensor | None) -> Tensor | None:
    """Ids, places or lengths as the kernels take them. A cast would make some of anything: other types are
    refused, and an int64 that is out of range becomes the nearest int32, which stays invalid."""
    if tensor is None or tensor.dtype is torch.int32:
        return tensor
    if tensor.dtype not in _INTEGERS:
        raise Error(f"{op}: {name} are {tensor.dtype}: give int32 or int64")
    if tensor.dtype is torch.int64:
        tensor = tensor.clamp(_INT32.min, _INT32.max)
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


def explain(op: str, kinds: Mapping[str, Kind], schema, arguments: Sequence) -> Error | None:
    """The fault in the arguments of a custom op, if it is known."""
    tensors = []
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
                return Error(f"{op}: {shown} is {problem}: give a strided tensor on the CPU or a "
                             "GPU")
            tensors.append((of, one))
    try:
        expect_one_device(op, [tensor for _, tensor in tensors])
        check_tensors(op, kinds, tensors)
    except Error as error:
        return error
    return None


def expect_tensors(op: str, kinds: Mapping[str, Kind], **named: Tensor | None) -> None:
    """Before an op computes with them itself: that these are tensors of the op's kinds."""
    if torch.compiler.is_compiling():
        return
    there = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    for name, tensor in there:
        expect_tensor(op, name, tensor)
    expect_one_device(op, [tensor for _, tensor in there])
    check_tensors(op, kinds, there)


def expect_tensor(op: str, name: str, value) -> None:
    """That this is a tensor whose elements have strides."""
    problem = _unlike_tensor(value)
    if problem:
        raise Error(f"{op}: {name} is {problem}: give a tensor")


def expect_module(function: str, model) -> None:
    if not isinstance(model, nn.Module):
        raise Error(f"{function}: {type(model).__name__} is not a torch.nn.Module: give a model")


def expect_one_of(what: str, value, words: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in words:
        raise Error(f"{what} is {named(value)}: give one of {', '.join(words)}")


def device_of(what: str, value) -> torch.device:
    """The CPU, or a GPU with its number."""
    try:
        given = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        given = None
    if given is None or given.type not in ("cpu", "cuda"):
        raise Error(f"{what} is {named(value)}: give 'cpu', 'cuda' or 'cuda:0'")
    if given.type == "cuda" and given.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return given


def folder_of(what: str, value) -> str:
    """A folder's path as text."""
    try:
        path = os.fsdecode(value)
        encodable = bool(os.fsencode(path)) and "\0" not in path
    except (TypeError, UnicodeError):
        encodable = False
    if not encodable:
        raise Error(f"{what} is {named(value)}: give the path of a folder")
    return path


def several(op: str, name: str, value, count: int, words: str) -> tuple:
    """The given values, `count` of them, as a tuple."""
    if not isinstance(value, (list, tuple)):
        raise Error(f"{op}: {name} is {named(value)}: give {words}")
    if len(value) != count:
        raise Error(f"{op}: {name} holds {len(value)} values, not {count}: give {words}")
    return tuple(value)


def count_of(op: str, name: str, value) -> int:
    """An integer, or the symbol of one."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        raise Error(f"{op}: {name} is {named(value)}: give an integer")
    return value


def flag(op: str, name: str, value) -> bool:
    if value is True or value is False:
        return value
    raise Error(f"{op}: {name} is {named(value)}: give True or False")


def expect_values(op: str, *, positive: Mapping, counts: Mapping, words: Mapping, numbers: Mapping,
                  flags: Mapping) -> None:
    """That options by name are integers of 1, or 0, and more, words, finite numbers, True or False."""
    for least, integers in ((1, positive), (0, counts)):
        for name, value in integers.items():
            if type(value) is not int or value < least:
                raise Error(f"{op}: {name} is {named(value)}: give a positive integer")
    for name, value in words.items():
        if not isinstance(value, str) or not value.replace("-", "").isalnum():
            raise Error(f"{op}: {name} is {named(value)}: give a word")
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Error(f"{op}: {name} is {named(value)}: give a number")
        check_number(op, name, value)
    for name, value in flags.items():
        flag(op, name, value)


def explain_rest(op: str, schema, arguments: Sequence, error: Exception) -> Error:
    """An error of what is known to be an op's own, where no argument by itself is wrong."""
    for declared, value in zip(schema.arguments, arguments):
        if declared.alias_info is not None and isinstance(value, Tensor) and any(
                stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape)):
            return Error(f"{op}: {declared.name} is written in place, and its elements share memory: clone it")
    shapes = ", ".join(f"{declared.name} {list(value.shape)}"
                       for declared, value in zip(schema.arguments, arguments)
                       if isinstance(value, Tensor))
    lines = str(error).splitlines() or [""]
    return Error(f"{op}: these do not fit together: {shapes}: {lines[0]}")


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
    if has_sizes(value):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    text = repr(value) if value is None or isinstance(value, (str, bool, int, float)) else ""
    if not text or len(text) > 40 or not text.isprintable():
        return f"of type {type(value).__name__}"
    return text


def _article(word: str) -> str:
    return {"str": "a string", "bool": "True or False", "int": "an integer",
            "float": "a number", "Tensor": "a tensor"}.get(word, "a list")


def expect_in_place(label: str, tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous()
                                   or tensor.is_cuda and tensor.data_ptr() & 15):
            raise Error(f"{label}: a gradient to add to is not contiguous, or not at an address of "
                        "16 bytes")
