"""Custom ops that follow from the registry's description of an op.

A declaration adds to the description what is PyTorch's own: the order of the arguments, and what a
call may leave out.

    declare("linear", "linear", "x, w, bias?, residual?", "y", casts=True, by_row=True)

From both follow the schema, the kernel, the fake kernel, the checks, and the problem of a call.

An argument is `name=library:kind?!`: `library` is the buffer's or field's name where it differs, or
several with | between them; `kind` an element type that is cast or checked otherwise (KINDS), or the
type of a value in the schema; `?` may be None; `!` is written. A result is `name=library:like?given`:
`like` is an argument whose shape and type it has; `given` is the argument without which it is empty.
"""
import functools
import math
import re
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import DATA, FP8, float32, int32
from ._custom import OPS, define as define_custom, fake
from ._derived_form import DerivedForm
from ._description import (Argument, Description, Result, Variant, arguments_of, python_of,
                           results_of, symbols_of, value_of)
from ._library import Error
from ._run import run

_TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "fp8": torch.float8_e4m3fn,
          "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8}


def _schema(name: str, arguments: Sequence[Argument], returns: str) -> str:
    letters = iter("abcdefgh")
    parts = []
    for a in arguments:
        alias = f"({next(letters)}!)" if a.written else ""
        parts.append(f"{a.type}{alias}{'?' if a.optional else ''} {a.name}")
    return f"{name}({', '.join(parts)}) -> {returns}"


def define(name: str, of: str, arguments: str, returns: str, *, back: bool = False,
           shapes: Mapping[str, str] = {}, fixed: Mapping[str, str] = {}, label: str = "",
           keeps: Sequence[str] = (), **rules):
    """Defines torch.ops.fftune.<name> with the decorated kernel, a form of the library's op `of`,
    which errors call `label`. `shapes` has, in words, those of tensors that are not laid out as the
    library's. The other rules are those of `_custom.define`."""
    found = arguments_of(arguments, Description.of(of, back, tuple(fixed.items())), shapes)
    return _define(name, found, label or of, returns, keeps, **rules)


def _define(name, arguments, label, returns, keeps, **rules):
    return define_custom(_schema(name, arguments, returns), label,
                         {a.name: a.kind for a in arguments if a.kind},
                         keeps=tuple(i for i, a in enumerate(arguments) if a.name in keeps), **rules)


class _Allocations:
    """Python's text for what allocates each result of an op, in terms of its arguments."""

    def __init__(self, form: DerivedForm):
        self.form, self.about = form, form.about
        self.needed = [(a.name, self._first(a.library).shape) for a in form.arguments
                       if a.kind and not a.optional and len(a.library) == 1]
        self.typed = form.arguments[form.typed].name
        self.of_data = {a.name for a in form.arguments if a.kind and a.kind.types in (DATA, FP8)}

    def _first(self, library: Sequence[str]) -> Variant:
        """The variant with every size that may be given."""
        variants = [v for n in library for v in self.about.buffers.get(n, ())]
        declared = {a.library[0] for a in self.form.arguments if not a.kind}
        return next((v for v in variants if any(allowed == ["given"] and axis in declared
                                                for axis, allowed in v.when.items())), variants[0])

    def text_of(self, result: Result, is_fake: bool) -> str:
        variant = self._first(result.library)
        if result.like is not None:
            like = self.form.arguments[result.like]
            of = f"{like.name}_" if like.cast == "row" else like.name
            shape, dtype = f"{of}.shape", ""
        else:
            of, shape, dtype = self.typed, self._shape(variant.shape), self._dtype(result, variant)
            if shape.removesuffix(".shape") in self.of_data:
                of = shape.removesuffix(".shape")
        made = f"{of}.new_empty({shape}{dtype})"
        if is_fake or shape != f"{of}.shape":
            return made
        return f"empty_like({of}{dtype}) if {of}.is_contiguous() else {made}"  # in half the time

    def _dtype(self, result: Result, variant: Variant) -> str:
        for argument in self.form.arguments:
            axis, words = argument.library[0], self.form.words.get(argument.name)
            if words and axis in variant.when:
                dtypes = {value: v.dtype for value, word in words.items() for n in result.library
                          for v in self.about.buffers.get(n, ()) if word in v.when[axis]}
                choice = ", ".join(f"{value!r}: {dtype}" for value, dtype in dtypes.items())
                return f", dtype={{{choice}}}[{argument.name}]"
        return "" if variant.dtype == "T" else f", dtype={variant.dtype}"

    def _shape(self, wanted: tuple[str, ...]) -> str:
        for name, shape in self.needed:
            if shape == wanted:
                return f"{name}.shape"
        if not self.about.leads(wanted):
            return f"({', '.join(map(self._extent, wanted))},)"
        name, shape = next(one for one in self.needed if self.about.leads(one[1]))
        lead = f"{name}.shape" if len(shape) == 1 else f"{name}.shape[:{1 - len(shape)}]"
        return f"(*{lead}, {', '.join(map(self._extent, wanted[1:]))})" if wanted[1:] else lead

    def _extent(self, text: str) -> str:
        for name, shape in self.needed:
            if text in shape and (text != "m" or not self.about.leads(shape)):
                return f"{name}.shape[{shape.index(text) - len(shape)}]"
        return re.sub(r"[a-z_]+", lambda found: self._size(found[0]), python_of(text))

    def _size(self, size: str) -> str:
        for argument in self.form.arguments:
            if not argument.kind and argument.library[0].replace("-", "_") == size:
                return argument.name
        for name, shape in self.needed:
            if size == "m" and self.about.leads(shape):
                # Size.numel() would make a constant of a symbolic size.
                return f"prod({name}.shape[:{name}.dim() - {len(shape) - 1}])"
            for axis, text in enumerate(shape):
                if symbols_of(text) == (size,) and (size != "m" or axis):
                    step = value_of(text, {size: 1})
                    part = f" // {step}" if step > 1 else ""
                    return f"({name}.shape[{axis - len(shape)}]{part})"
        raise AssertionError(f"{self.form.op}: no argument has the size {size}")


_CASTS = {"row": "{0} if {0}.dtype is {typed}.dtype else float32(label, '{0}', {0})",
          "floats": "float32(label, '{0}', {0})", "ints": "int32(label, '{0}', {0})"}


def _texts(name: str, form: DerivedForm, prepare: Mapping, as_list: bool) -> str:
    """Python's text of an op's kernel and of its fake kernel. For linear_backward it is

        def linear_backward(dy, x, w, bias):
            r0 = empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
            r1 = empty_like(w) if w.is_contiguous() else w.new_empty(w.shape)
            r2 = None if bias is None or bias is False else dy.new_empty((w.shape[-2],))
            run(form, ((bias,), <places of the results that are there>), (dy, x, w), <results>)
            r2 = dy.new_empty(0) if r2 is None else r2
            return r0, r1, r2
    """
    arguments, results = form.arguments, form.results
    allocations, typed = _Allocations(form), arguments[form.typed].name
    signature = ", ".join(a.name for a in arguments)
    casts, fake_casts, allocated, allocated_fakes, back = [], [], [], [], []
    likes = {result.like for result in results}
    run_names = [a.name for a in arguments]
    for i, a in enumerate(arguments):
        text = (f"prepare['{a.name}']({a.name}, ({signature},))" if a.name in prepare else
                _CASTS[a.cast].format(a.name, typed=typed) if a.cast in _CASTS else "")
        if text:
            run_names[i] = f"{a.name}_"
            casts.append(f"{a.name}_ = {text}")
            if i in likes and a.cast == "row":
                fake_casts.append(casts[-1])
    for k, result in enumerate(results):
        condition = ""
        if result.given is not None:
            given = arguments[result.given].name
            condition = f"None if {given} is None or {given} is False else "
        for is_fake, lines in ((False, allocated), (True, allocated_fakes)):
            lines.append(f"r{k} = {condition}{allocations.text_of(result, is_fake)}")
        if result.like is not None and arguments[result.like].cast == "row":
            back.append(f"r{k} = r{k}.to({arguments[result.like].name}.dtype)")
    may_lack = any(r.given is not None for r in results)
    order = list(form.about.buffers)
    written = [(order.index(a.library[0].removesuffix("_before")), a.name) for a in arguments
               if a.adds]
    outputs = [n for _, n in sorted([*((order.index(r.library[0]), f"r{k}")
                                       for k, r in enumerate(results)), *written])]
    made = [f"r{k}" for k in range(len(results))]
    present = (f"tuple(k for k, t in enumerate(({', '.join(made)},)) if t is not None)"
               if may_lack else repr(tuple(range(len(results)))))
    optional = may_lack or any(a.adds and a.optional for a in arguments)
    buffers = f"({', '.join(outputs)},)"
    if optional:
        buffers = f"[t for t in {buffers} if t is not None]"
    fields = "".join(f"{arguments[i].name}, " for i in form.fields)
    inputs = ", ".join(run_names[i] for i in form.places)
    call = f"run(form, (({fields}), {present}), ({inputs},), {buffers})"
    if written:
        names = ", ".join(n for _, n in written)
        call = f"expect_in_place(label, ({names},)); {call} if r0.numel() else None"
    absent = [f"r{k} = {typed}.new_empty(0) if r{k} is None else r{k}"
              for k, r in enumerate(results) if r.given is not None and not as_list]
    returned = (f"[t for t in ({', '.join(made)},) if t is not None]" if as_list else
                made[0] if len(made) == 1 else ", ".join(made))
    bodies = {name: [*casts, *allocated, call, *back, *absent, f"return {returned}"],
              f"{name}_fake": [*fake_casts, *allocated_fakes, *back, *absent,
                               f"return {returned}"]}
    return "\n".join(f"def {function}({signature}):\n    " + "\n    ".join(lines)
                     for function, lines in bodies.items())


def declare(name: str, of: str, arguments: str, results: str, *, back: bool = False,
            label: str = "", fixed: Mapping[str, str] = {}, check: Callable | None = None,
            prepare: Mapping[str, Callable] = {}, words: Mapping[str, dict] = {},
            loose: Sequence[str] = (), returns: str = "", keeps: Sequence[str] = (), **rules) -> DerivedForm:
    """Declares torch.ops.fftune.<name>, a form of the library's op `of`.

    `check(**arguments)` raises Error for what does not go together in Python's words. `prepare` has
    functions (tensor, arguments) of arguments that the library takes otherwise. `words` has the
    library's words for the values of arguments. The options `loose` count only where their buffers
    are given. A list is returned, without the results that are not there, if `returns` is
    "Tensor[]". The other options are those of `define`. Returns what `run_into` takes.
    """
    about = Description.of(of, back, tuple(fixed.items()))
    label = label or of
    declared = arguments_of(arguments, about, {})
    made = results_of(results, declared)
    form = DerivedForm(label, about, declared, made, check, words, loose)
    if not returns:
        returns = "Tensor" if len(made) == 1 else f"({', '.join(['Tensor'] * len(made))})"

    @functools.cache
    def compiled() -> tuple[Callable, Callable]:
        functions = {"form": form, "label": label, "prepare": prepare, "prod": math.prod, "run": run,
                     "empty_like": torch.empty_like, "float32": float32, "int32": int32,
                     "expect_in_place": _expect_in_place, **_TORCH}
        text = _texts(name, form, prepare, returns == "Tensor[]")
        exec(compile(text, f"<fftune::{name}>", "exec"), functions)
        return functions[name], functions[f"{name}_fake"]

    def kernel(*arguments):  # until it is first called, as imports are to be fast
        run_op, _ = compiled()
        op = getattr(OPS, name)
        if op.kernel is kernel:
            op.kernel = run_op
        return run_op(*arguments)

    _define(name, declared, label, returns, keeps, **rules)(kernel)
    fake(name)(lambda *arguments: compiled()[1](*arguments))
    return form


def run_into(form: DerivedForm, arguments: Sequence, outputs: Sequence[Tensor]) -> None:
    """Runs a declared op with the declaration's arguments, prepared, and with all its results given."""
    run(form, (tuple(arguments[i] for i in form.fields), tuple(range(len(outputs)))),
        tuple(arguments[i] for i in form.places), outputs)


def _expect_in_place(label: str, tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous()
                                   or tensor.is_cuda and tensor.data_ptr() & 15):
            raise Error(f"{label}: a gradient to add to is not contiguous, or not at an address of "
                        "16 bytes")
