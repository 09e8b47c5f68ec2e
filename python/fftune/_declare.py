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
import inspect
import math
import re
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import DATA, FP8, TORCH_DTYPES, float32, int32
from ._custom import OPS, call, define, fake, gradient as differentiate, is_disabled
from ._derived_form import DerivedForm
from ._description import (Argument, Description, Result, Variant, arguments_of, python_of,
                           results_of, symbols_of, value_of)
from ._library import Error
from ._run import find, finish, ready


def _schema(name: str, arguments: Sequence[Argument], returns: str) -> str:
    letters = iter("abcdefgh")
    parts = []
    for a in arguments:
        alias = f"({next(letters)}!)" if a.written else ""
        parts.append(f"{a.type}{alias}{'?' if a.optional else ''} {a.name}")
    return f"{name}({', '.join(parts)}) -> {returns}"


class _Allocations:
    """Python's text for what allocates each result of an op, in terms of its arguments."""

    def __init__(self, form: DerivedForm, sizes: Mapping[str, Callable]):
        self.form, self.about, self.own_sizes = form, form.about, sizes
        first = form.first if form.typed is None else form.typed
        self.typed = form.arguments[first].name
        self.fields = {n for a in form.arguments if not a.kind for n in a.library}
        # The forms of an op whose tensors have other dimensions: the condition that the first one's
        # variant asks for, by its number of dimensions.
        self.layouts: dict[int, dict] = {}
        for variant in self._variants(form.arguments[first].library):
            if self.about.leads(variant.shape):
                self.layouts = {0: {}}
                break
            self.layouts.setdefault(len(variant.shape), variant.when)

    def _variants(self, library: Sequence[str]) -> list[Variant]:
        return [v for n in library for v in self.about.buffers.get(n, ())]

    def _first(self, library: Sequence[str], layout: Mapping) -> Variant:
        """The variant of a layout with every size that may be given."""
        return max((v for v in self._variants(library)
                    if all(layout.get(axis, allowed) == allowed for axis, allowed in v.when.items()
                           if axis not in self.about.sizes and axis not in self.about.fixed)),
                   key=lambda v: sum(allowed == ["given"] and (
                       axis in self.fields or self.about.tokens != "m")
                       for axis, allowed in v.when.items()))

    def text_of(self, result: Result, is_fake: bool) -> str:
        if result.like is not None:
            like = self.form.arguments[result.like]
            of = f"{like.name}_" if like.cast == "row" else like.name
            return self._made(of, f"{of}.shape", "", is_fake)
        texts = {}
        for dims, layout in self.layouts.items():
            self.needed = [(a.name, self._first(a.library, layout).shape)
                           for a in self.form.arguments
                           if a.kind and not a.optional and len(a.library) == 1]
            variant = self._first(result.library, layout)
            of, shape = self.typed, self._shape(variant.shape)
            named = shape.removesuffix(".shape")
            if any(a.name == named and a.kind.types in (DATA, FP8) for a in self.form.arguments
                   if a.kind):
                of = named
            texts.setdefault(self._made(of, shape, self.dtype_of(result), is_fake), dims)
        *others, last = texts
        return "".join(f"({text}) if {self.typed}.dim() == {texts[text]} else "
                       for text in others) + last

    def _made(self, of: str, shape: str, dtype: str, is_fake: bool) -> str:
        # Extents one by one take PyTorch two thirds of a tuple's time.
        sizes = shape[1:-1].rstrip(",") if shape.startswith("(") else shape
        made = f"{of}.new_empty({sizes}{dtype})"
        if is_fake or shape != f"{of}.shape":
            return made
        return f"empty_like({of}{dtype}) if {of}.is_contiguous() else {made}"  # in half the time

    def dtype_of(self, result: Result) -> str:
        """The type that a result is allocated in, which a value of an argument may decide."""
        variants = self._variants(result.library)
        for argument in self.form.arguments:
            axis = argument.library[0]
            if argument.type not in ("str", "bool") or axis not in variants[0].when:
                continue
            words = self.form.words.get(argument.name) or {w: w for w in self.about.domain(axis)}
            dtypes = {value: f"{self.typed}.dtype" if v.dtype == "T" else v.dtype
                      for value, word in words.items() for v in variants
                      if word in v.when[axis]}
            if len(set(dtypes.values())) > 1:
                choice = ", ".join(f"{value!r}: {dtype}" for value, dtype in dtypes.items())
                return f", dtype={{{choice}}}.get({argument.name})"
        return "" if variants[0].dtype == "T" else f", dtype={variants[0].dtype}"

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
        if size in self.own_sizes:
            return f"{size}_"
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


_CASTS = {"row": "{0} if {0}.dtype is {typed}.dtype else float32(label, '{1}', {0})",
          "floats": "float32(label, '{1}', {0})", "ints": "int32(label, '{1}', {0})"}


def _called(text: str, function: Callable, *first: str) -> str:
    """The call of a function whose parameters have arguments' names."""
    names = list(inspect.signature(function).parameters)[len(first):]
    return f"{text}({', '.join([*first, *names])})"


def _prepared(form: DerivedForm, prepare: Mapping, lays: Mapping, typed: str) -> dict[str, str]:
    """Python's text of what the kernels take in the place of each argument that is not as it is."""
    texts = {}
    for a in form.arguments:
        if a.name in lays:
            continue
        if a.name in prepare:
            texts[a.name] = _called(f"prepare['{a.name}']", prepare[a.name], a.name)
        elif a.cast in _CASTS:
            texts[a.name] = _CASTS[a.cast].format(a.name, a.shown, typed=typed)
        elif a.written and not a.adds:
            texts[a.name] = f"ready({a.name})"
        if a.kind and lays:
            text = f"ready({texts.get(a.name, a.name)})"
            texts[a.name] = f"None if {a.name} is None else {text}" if a.optional else text
    return texts


def _texts(name: str, form: DerivedForm, prepare: Mapping, lays: Mapping, sizes: Mapping,
           as_list: bool) -> str:
    """Python's text of an op's kernel and of its fake kernel. For linear_backward it is::

        def linear_backward(dy, x, w, bias):
            found = find(form, ((bias,), <places of the results that are there>), (dy, x, w))

            r0 = empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)
            r1 = empty_like(w) if w.is_contiguous() else w.new_empty(w.shape)
            r2 = None if bias is None or bias is False else dy.new_empty(w.shape[-2])

            finish(found, <results>)
            r2 = dy.new_empty(0) if r2 is None else r2
            return r0, r1, r2

    The arguments are checked, as a part of find(), before results are allocated.
    """
    arguments, results = form.arguments, [r for r in form.results if not r.hidden]
    allocations = _Allocations(form, sizes)
    typed = allocations.typed
    signature = ", ".join(a.name for a in arguments if not a.hidden)
    made = [f"r{k}" for k in range(len(results))]
    own_sizes = [f"{size}_ = {_called(f'sizes[{size!r}]', f)}" for size, f in sizes.items()]
    prepared = _prepared(form, prepare, lays, typed)
    casts = [f"{n}_ = {text}" for n, text in prepared.items()]
    strides = []
    for n, (function, names) in lays.items():
        places = [f"{n}_{k}" for k in range(len(names))]
        strides += places
        casts.append(f"{n}_, {', '.join(places)} = {_called(f'lays[{n!r}][0]', function, n)}")
    rows = [i for i in {r.like for r in results} - {None} if arguments[i].cast == "row"]
    fake_casts = [f"{arguments[i].name}_ = {prepared[arguments[i].name]}" for i in sorted(rows)]
    allocated, allocated_fakes, back, absent, there = [], [], [], [], []
    for k, result in enumerate(results):
        condition = ""
        if result.given is not None:
            given = arguments[result.given].name
            is_absent = f"not {given}" if arguments[result.given].type == "int" else \
                f"{given} is None or {given} is False"
            condition = f"None if {is_absent} else "
            there.append(f"*(() if {is_absent} else ({k},))")
            if not as_list:
                dtype = "" if result.like is not None else allocations.dtype_of(result)
                absent.append(f"r{k} = {typed}.new_empty(0{dtype}) if r{k} is None else r{k}")
        else:
            there.append(f"{k}")
        for is_fake, lines in ((False, allocated), (True, allocated_fakes)):
            lines.append(f"r{k} = {condition}{allocations.text_of(result, is_fake)}")
        if result.like in rows:
            back.append(f"r{k} = r{k}.to({arguments[result.like].name}.dtype)")
    order = list(form.about.buffers)
    added = [(order.index(a.library[0].removesuffix("_before")), a.name) for a in arguments if a.adds]
    outputs = [n for _, n in sorted([*((order.index(r.library[0]), f"r{k}")
                                       for k, r in enumerate(results)), *added])]
    buffers = f"({''.join(f'{n}, ' for n in outputs)})"
    if any(r.given is not None for r in results) or any(a.adds and a.optional for a in arguments):
        buffers = f"[t for t in {buffers} if t is not None]"
    values = [f"tuple({a.name})" if a.type == "float[]" else a.name
              for a in (arguments[i] for i in form.fields)]
    fields = "".join(f"{n}, " for n in (*values, *strides))
    inputs = ", ".join(f"{n}_" if n in prepared or n in lays else n
                       for n in (arguments[i].name for i in form.places))
    started = [f"found = find(form, (({fields}), ({''.join(f'{k}, ' for k in there)})), ({inputs},))"]
    finished = [f"finish(found, {buffers})"]
    if added:
        started.insert(0, f"expect_in_place(label, ({', '.join(n for _, n in added)},))")
        finished[0] += " if r0.numel() else None"
    finished += [f"if {a.name}_ is not {a.name}: {a.name}.copy_({a.name}_)" for a in arguments
                 if a.written and not a.adds]
    returned = (f"[t for t in ({', '.join(made)},) if t is not None]" if as_list else
                made[0] if len(made) == 1 else ", ".join(made))
    bodies = {name: [*own_sizes, *casts, *started, *allocated, *finished, *back, *absent,
                     f"return {returned}"],
              f"{name}_fake": [*own_sizes, *fake_casts, *allocated_fakes, *back, *absent,
                               f"return {returned}"]}
    return "\n".join(f"def {function}({signature}):\n    " + "\n    ".join(lines)
                     for function, lines in bodies.items())


def declare(name: str, of: str, arguments: str, results: str, *, back: bool = False,
            label: str = "", fixed: Mapping[str, str] = {}, check: Callable | None = None,
            fill: Callable | None = None, sizes: Mapping[str, Callable] = {},
            prepare: Mapping[str, Callable] = {}, lays: Mapping[str, tuple] = {},
            words: Mapping[str, dict] = {}, loose: Sequence[str] = (),
            shapes: Mapping[str, str] = {}, names: Mapping[str, str] = {},
            keeps: Sequence[str] = (), returns: str = "", kernel: Callable | None = None,
            gradient: str = "", by_row: bool = False, **rules) -> DerivedForm:
    """Declares torch.ops.fftune.<name>, a form of the library's op `of`, which errors call `label`.

    `check(**arguments)` raises Error for what does not go together in Python's words. `fill(fields,
    **arguments)` changes options and sizes by the library's names. `sizes` has functions of sizes
    that are no extent. `prepare` has functions (tensor, ...) of arguments that the library takes in
    another form. `lays` has functions that return a tensor and its strides, with the strides' names,
    of tensors whose strides the library takes. Parameters of these functions are the arguments of
    the same name; x_, x_0 and x_1 are the results of x's function before. `words` has the
    library's words for the values of arguments. The options `loose` count only where their buffers
    are given. `shapes` and `names` are those of `arguments_of`. A list is returned, without the
    results that are not there, if `returns` is "Tensor[]". `kernel(form, *arguments)` runs the op
    where that does not follow: the library's other buffers have a "-" in front of their names.
    `gradient` is the op that computes it: its arguments are results' gradients (dy of y),
    arguments, and results, by name; its results are the gradients of arguments. `by_row`: all
    results have the leading dimensions of the tensors that begin with the tokens. The other rules
    are those of `_custom.define`. Returns what `run_into` takes.
    """
    # Tensors have their own extents, whatever strides the library takes of them.
    strides = dict.fromkeys([stride for _, names in lays.values() for stride in names], "")
    about = Description.of(of, back, tuple({**strides, **fixed}.items()), arguments)
    label = label or of
    every = arguments_of(arguments, about, shapes, names)
    form = DerivedForm(label, about, every, results_of(results, every), check=check, fill=fill,
                       words=words, loose=loose, lays=lays)
    declared = [a for a in every if not a.hidden]
    made = [r for r in form.results if not r.hidden]
    if not returns:
        returns = "Tensor" if len(made) == 1 else f"({', '.join(['Tensor'] * len(made))})"

    @functools.cache
    def compiled() -> tuple[Callable, Callable]:
        functions = {"form": form, "label": label, "prepare": prepare, "lays": lays, "sizes": sizes,
                     "prod": math.prod, "find": find, "finish": finish, "ready": ready,
                     "empty_like": torch.empty_like, "float32": float32, "int32": int32,
                     "expect_in_place": _expect_in_place, **TORCH_DTYPES}
        text = _texts(name, form, prepare, lays, sizes, returns == "Tensor[]")
        exec(compile(text, f"<fftune::{name}>", "exec"), functions)
        return (functools.partial(kernel, form) if kernel else functions[name],
                functions[f"{name}_fake"])

    def first_call(*arguments):  # until then it is not compiled, as imports are to be fast
        run_op, _ = compiled()
        op = getattr(OPS, name)
        if op.kernel is first_call:
            op.kernel = run_op
        return run_op(*arguments)

    def fake_call(*arguments):
        if check and not is_disabled() and not any(map(_is_symbolic, arguments)):
            check(**{a.name: value for a, value in zip(declared, arguments)})
        return compiled()[1](*arguments)

    define(_schema(name, declared, returns), label, {a.name: a.kind for a in declared if a.kind},
           keeps=tuple(i for i, a in enumerate(declared) if a.name in keeps),
           rows=tuple(i for i, a in enumerate(declared) if by_row and a.leads), **rules)(first_call)
    fake(name)(fake_call)
    _forms[name] = form
    if gradient:
        _differentiate(name, form, gradient)
    return form


_forms: dict[str, DerivedForm] = {}
FROZEN = {"frozen": "yes"}  # the form of a backward pass that leaves out gradients of weights


def _differentiate(name: str, form: DerivedForm, backward: str) -> None:
    """Gives an op its gradient by another, which is declared later; or, where it gives all that are
    wanted, by the one of weights that are frozen. The places are those of the arguments and results
    in one row. Where x and a residual are added first, the backward op's x is their sum, and dx the
    gradient of both."""
    names = [a.name for a in form.arguments] + [r.name for r in form.results]
    count = len(form.arguments)
    adds = {"residual", "sum"} <= set(names)

    frozen = backward.replace("_backward", "_frozen_backward")

    @functools.cache
    def sources(backward: str) -> tuple:
        """For each argument of the backward op the place of the gradient, and of the value; the
        results that have no gradient; for each argument its gradient's place among the results."""
        back = _forms[backward]
        of = {f"d{line}{n}": i for i, n in enumerate(names[count:]) for line in ("", "_")}
        places = {n: i for i, n in enumerate(names)}
        if adds:
            places["x"] = places["sum"]
        given = [(of.get(a.name), None if a.name in of else places.get(a.name))
                 for a in back.arguments]
        others = [count + k for k in range(len(form.results)) if k not in {g for g, _ in given}]
        made = {r.name: k for k, r in enumerate(back.results)}
        if adds:
            made["dresidual"] = made["dx"]
        return given, others, [made.get(f"d{n}", made.get(f"d_{n}")) for n in names[:count]]

    def setup(ctx, inputs, output):
        given, others, _ = sources(backward)
        row = *inputs, *(output if isinstance(output, tuple) else (output,))
        if others:
            ctx.mark_non_differentiable(*[row[i] for i in others])
        if adds or len(form.results) == len(others) + 1:
            ctx.set_materialize_grads(False)
        values = [None if i is None else row[i] for _, i in given]
        ctx.options = [None if isinstance(v, Tensor) else v for v in values]
        ctx.save_for_backward(*[v if isinstance(v, Tensor) else None for v in values])

    @differentiate(name, setup)
    def _(ctx, *gradients):
        given, _, made = sources(backward)
        if gradients[0] is None:  # none is where there are several to compute with
            return tuple(gradients[1] if adds and n in ("x", "residual") else None
                         for n in names[:count])
        values = {(g, v): gradients[g] if g is not None else option if saved is None else saved
                  for (g, v), option, saved in zip(given, ctx.options, ctx.saved_tensors)}
        name = backward
        if frozen in _forms:
            of_frozen, _, made_frozen = sources(frozen)
            if not any(need and k is not None and made_frozen[i] is None
                       for i, (need, k) in enumerate(zip(ctx.needs_input_grad, made))):
                name, given, made = frozen, of_frozen, made_frozen
        results = call(getattr(OPS, name), *[values[key] for key in given])
        results = results if isinstance(results, tuple) else (results,)
        return tuple(None if k is None else results[k] for k in made)


def _is_symbolic(argument) -> bool:
    """Whether a check of it would make a constant of a size."""
    sizes = argument.shape if isinstance(argument, Tensor) else (argument,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def run_into(form: DerivedForm, arguments: Sequence, outputs: Sequence[Tensor]) -> None:
    """Runs a declared op with the declaration's arguments, prepared, and with all its results given."""
    finish(find(form, (tuple(arguments[i] for i in form.fields), tuple(range(len(outputs)))),
                tuple(arguments[i] for i in form.places)), outputs)


def _expect_in_place(label: str, tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous()
                                   or tensor.is_cuda and tensor.data_ptr() & 15):
            raise Error(f"{label}: a gradient to add to is not contiguous, or not at an address of "
                        "16 bytes")
