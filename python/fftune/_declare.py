"""Custom ops that follow from the registry's description of an op.

`_op_table.json`, which the target `op_table` writes, has each op's sizes, options and buffers: their
element types, their extents as formulas of the sizes, and the options with which they are there. A
declaration adds what is PyTorch's own: the order of the arguments and what a call may leave out.

    declare("linear", "linear", "x, w, bias?, residual?", "y", casts=True, by_row=True)

From both follow the schema, the kernel, the fake kernel, the checks, and the problem of a call.

An argument is `name=library:kind?!`: `library` is the buffer's or field's name where it differs, or
several with | between them; `kind` an element type that is cast or checked otherwise (KINDS), or the
type of a value in the schema; `?` may be None; `!` is written. A result is `name=library:like?given`:
`like` is an argument whose shape and type it has; `given` is the argument without which it is empty.
"""
import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import (DATA, DTYPE_NAMES, FP8, KINDS, Kind, check_number, check_tensors, expect,
                      float32, int32)
from ._custom import define as define_custom, fake
from ._library import Error
from ._run import run

_TABLE = json.loads((Path(__file__).parent / "_op_table.json").read_text())
_EXACT = {"T": DATA, "fp8": FP8, "f32": KINDS["f32"], "i32": KINDS["i32"], "u8": KINDS["u8"]}
_TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "fp8": torch.float8_e4m3fn,
          "i32": torch.int32, "i8": torch.int8, "u8": torch.uint8}
_VALUES = ("str", "bool", "int", "float", "float[]", "Tensor[]")
_ARGUMENT = re.compile(r"(\w+)(?:=([\w|-]+))?(?::([\w\[\]]+))?(\??)(!?)")
_RESULT = re.compile(r"(\w+)(?:=([\w|-]+))?(?::(\w+))?(?:\?(\w+))?")


def _python(text: str) -> str:
    """An extent such as "4 * ceil(s / 128)" as Python has it."""
    text = re.sub(r"ceil\((.+?) / (.+?)\)", r"-(-(\1) // (\2))", text)
    return re.sub(r"(?<=[a-z])-(?=[a-z])", "_", text)


@functools.cache
def _formula(text: str):
    return compile(_python(text), "<extent>", "eval")


def _value(text: str, sizes: Mapping):
    return eval(_formula(text), {}, sizes)


def _symbols(text: str) -> tuple[str, ...]:
    return _formula(text).co_names


@dataclass(frozen=True)
class Variant:
    """A buffer with the dtype and extents that it has under a condition: values of options."""

    dtype: str
    shape: tuple[str, ...]
    when: dict

    def holds(self, values: Mapping) -> bool:
        return all(values[name] in allowed for name, allowed in self.when.items())


class Description:
    """A pass of an op of the registry, with some options fixed."""

    def __init__(self, op: str, back: bool, fixed: Mapping[str, str]):
        table, self.back = _TABLE[op], "bwd" if back else "fwd"
        self.op, self.tokens, self.sizes = op, table["tokens"], table["sizes"]
        self.options = {name: choices for name, of, choices in table["options"]
                        if of in ("", self.back)}
        self.fixed = {"dtype": "T", **fixed}
        # The usual values of all that decides about buffers: options, and whether sizes are given.
        self.usual = {**{name: choices[0] for name, choices in self.options.items()
                         if isinstance(choices, list)},
                      **dict.fromkeys(self.sizes, ""), **self.fixed}
        self.buffers: dict[str, list[Variant]] = {}
        self.inputs = set()
        for name, role, dtype, shape, when in table[self.back]:
            if all(self.fixed.get(axis, allowed[0]) in allowed for axis, allowed in when.items()):
                self.buffers.setdefault(name, []).append(Variant(dtype, tuple(shape), when))
                if role in ("input", "updated"):
                    self.inputs.add(name)

    def domain(self, axis: str) -> Sequence[str]:
        return (self.fixed[axis],) if axis in self.fixed else self.options.get(axis, ("", "given"))

    def leads(self, shape: Sequence[str]) -> bool:
        """Whether the first extent counts the tokens, which any leading dimensions may stand for."""
        return self.tokens == "m" and shape[:1] == ("m",)

    def words(self, shape: Sequence[str]) -> str:
        plain = [s.replace("2 * h", "2h") for s in shape]
        return f"[{', '.join(['...', *plain[1:]] if self.leads(shape) else plain)}]"


@dataclass(frozen=True)
class Argument:
    name: str
    library: tuple[str, ...]
    type: str  # of the schema
    kind: Kind | None  # of a tensor
    cast: str
    optional: bool
    written: bool

    @property
    def adds(self) -> bool:
        """Whether results are added to it."""
        return self.written and self.library[0].endswith("_before")


def _argument(text: str, about: Description, shapes: Mapping[str, str]) -> Argument:
    name, library, kind, optional, written = _ARGUMENT.fullmatch(text).groups()
    libraries = tuple((library or name).split("|"))
    field = library or name.replace("_", "-")
    if kind in _VALUES or not any(n in about.inputs for n in libraries) and kind not in KINDS:
        if not kind:
            kind = ("float" if about.options[field] == "number" else "str") if (
                field in about.options) else "int"
        return Argument(name, (field,), kind, None, "", False, False)
    variants = [v for n in libraries for v in about.buffers.get(n, ())]
    if kind in KINDS:
        types = KINDS[kind]
    else:
        dtypes = {v.dtype for v in variants}
        types = (KINDS["index"] if dtypes == {"i32", "i64"} else
                 FP8 if "T" in dtypes and about.fixed["dtype"] == "fp8" else
                 _EXACT[next(iter(dtypes - {"f32"} or dtypes))])
    ranks = {len(v.shape) for v in variants}
    shape = shapes.get(name) or ("[...]" if len(ranks) > 1 else about.words(variants[0].shape))
    return Argument(name, libraries, "Tensor", Kind(types, shape), kind or "", bool(optional),
                    bool(written))


def _arguments(text: str, about: Description, shapes: Mapping[str, str]) -> list[Argument]:
    return [_argument(one, about, shapes) for one in re.split(r",\s*", text)]


def _schema(name: str, arguments: Sequence[Argument], returns: str) -> str:
    letters = iter("abcdefgh")
    parts = []
    for a in arguments:
        alias = f"({next(letters)}!)" if a.written else ""
        kind = f"Tensor{alias}[]" if a.type == "Tensor[]" else f"{a.type}{alias}"
        parts.append(f"{kind}{'?' if a.optional else ''} {a.name}")
    return f"{name}({', '.join(parts)}) -> {returns}"


def define(name: str, of: str, arguments: str, returns: str, *, back: bool = False,
           shapes: Mapping[str, str] = {}, fixed: Mapping[str, str] = {}, label: str = "",
           keeps: Sequence[str] = (), **rules):
    """Defines torch.ops.fftune.<name> with the decorated kernel, a form of the library's op `of`,
    which errors call `label`. `shapes` has, in words, those of tensors that are not laid out as the
    library's. The other rules are those of `_custom.define`."""
    found = _arguments(arguments, Description(of, back, fixed), shapes)
    return _define(name, found, label or of, returns, keeps, **rules)


def _define(name, arguments, label, returns, keeps, **rules):
    return define_custom(_schema(name, arguments, returns), label,
                         {a.name: a.kind for a in arguments if a.kind},
                         keeps=tuple(i for i, a in enumerate(arguments) if a.name in keeps), **rules)


@dataclass(frozen=True)
class Result:
    library: tuple[str, ...]
    like: int | None  # the place of an argument
    given: int | None


class DerivedForm:
    """The problems of a declared op: a Form of fftune._run that knows them from the description."""

    strided = False

    def __init__(self, label: str, about: Description, arguments: Sequence[Argument],
                 results: Sequence[Result], check: Callable | None, words: Mapping[str, dict],
                 loose: Sequence[str]):
        self.op, self.about, self.label = about.op, about, label
        self.arguments, self.results, self.check = arguments, results, check
        self.words, self.loose = words, loose
        order = list(about.buffers)
        tensors = [i for i, a in enumerate(arguments) if a.kind]
        self.places = sorted(tensors, key=lambda i: order.index(arguments[i].library[0]))
        self.fields = [i for i, a in enumerate(arguments) if not a.kind]
        self.kinds = {a.name: a.kind for a in arguments if a.kind}
        self.typed = next(i for i in self.places if arguments[i].kind.types in (DATA, FP8))
        self.domains = self._domains()
        self.found: dict[tuple, dict[str, str]] = {}

    def _domains(self) -> dict[str, Sequence[str]]:
        """The values of options on which the declared buffers depend, without those that ask for
        others."""
        about = self.about
        declared = {n for a in (*self.arguments, *self.results) if a.library for n in a.library}
        domains = {axis: list(about.domain(axis)) for name in declared
                   for variant in about.buffers.get(name, ()) for axis in variant.when}
        for name, variants in about.buffers.items():
            for variant in () if name in declared or self._is_added(name) else variants:
                # The options on which the other buffer depends: if on one alone, that is settled.
                deciding = [axis for axis, allowed in variant.when.items()
                            if not {*domains.get(axis, (about.usual[axis],))} <= {*allowed}]
                if len(deciding) == 1 and deciding[0] in domains:
                    axis, = deciding
                    if domains[axis][0] not in variant.when[axis]:
                        domains[axis] = [v for v in domains[axis] if v not in variant.when[axis]]
        return domains

    def _is_added(self, name: str) -> bool:
        return any(a.adds and a.library[0].removesuffix("_before") == name for a in self.arguments)

    def problem(self, options: tuple, inputs: Sequence[Tensor | None]) -> dict | None:
        options, present = options
        given = dict(zip(self.places, inputs))
        dtype = given[self.typed].dtype
        named = [(self.arguments[i].name, given.get(i)) for i in sorted(self.places)]
        check_tensors(self.label, self.kinds, named, dtype)
        fields = {self.arguments[i].library[0]: self._field(self.arguments[i], value)
                  for i, value in zip(self.fields, options)}
        if self.check:
            self.check(**dict(named), **{self.arguments[i].name: value
                                         for i, value in zip(self.fields, options)})
        there = {i: t for i, t in given.items() if t is not None}
        values = self._values_for(there, fields, present, dtype)
        sizes = {n.replace("-", "_"): v for n, v in fields.items() if n in self.about.sizes and v}
        self._bind(there, values, sizes)
        if self.about.tokens == "m" and not sizes["m"]:
            return None
        problem = {"op": self.op, "pass": self.about.back, "dtype": DTYPE_NAMES[dtype]}
        for name in self.about.sizes:
            size = sizes.get(name.replace("-", "_"))
            if size is not None:
                problem[name] = size
        # Options on which buffers depend are left out where they have their usual values.
        found = {n: values[n] for n in self.domains if values[n] != self.about.usual[n]}
        free = {n: value for n, value in fields.items() if n not in self.domains}
        for name, value in {**self.about.fixed, **free, **found}.items():
            if name in self.about.options and value is not None:
                problem[name] = value
        return problem

    def run_into(self, arguments: Sequence, outputs: Sequence[Tensor]) -> None:
        """Runs the op with the declaration's arguments, prepared, and with all its results given."""
        run(self, (tuple(arguments[i] for i in self.fields), tuple(range(len(outputs)))),
            tuple(arguments[i] for i in self.places), outputs)

    def _field(self, argument: Argument, value):
        """An option or a size as the library takes it, None if it is left out."""
        if argument.name in self.words:
            return self.words[argument.name][value]
        if isinstance(value, bool):
            return "yes" if value else "no"
        if argument.type == "float":
            check_number(self.label, argument.name, value)
            return f"{float(value):.12g}"
        choices = self.about.options.get(argument.library[0], "size")
        return value or None if choices in ("pattern", "size") else value

    def _values_for(self, there: Mapping[int, Tensor], fields: Mapping, present: tuple[int, ...],
                    dtype: torch.dtype) -> dict[str, str]:
        """The values of options for which the op has these tensors and the results."""
        fixed = {n: v for n, v in fields.items() if n in self.domains}
        key = (tuple((i, t.dtype is dtype, t.dim()) for i, t in there.items()),
               tuple(fixed.items()), present)
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = self._search(there, fixed, dtype, present)
        return found

    def _search(self, there, fixed, dtype, present) -> dict[str, str]:
        axes = {axis: self._choices(axis, values, fixed) for axis, values in self.domains.items()}
        wanted = [self.arguments[i].library for i in there] + [
            self.results[i].library for i in present]
        count = len(wanted) + sum(self.arguments[i].adds for i in there)
        fitting = []
        for values in itertools.product(*axes.values()):
            values = {**self.about.usual, **dict(zip(axes, values))}
            names = {n for n, vs in self.about.buffers.items() if any(v.holds(values) for v in vs)}
            if len(names) == count and all(names.intersection(library) for library in wanted):
                misfits = sum(not self._has_form(i, t, values, dtype) for i, t in there.items())
                if not misfits:
                    return values
                fitting.append((misfits, len(fitting), values))
        if not fitting:
            words = ", ".join(self.arguments[i].name for i in sorted(there))
            raise Error(f"{self.label}: {words} do not go together: leave out those that belong to "
                        "others")
        return min(fitting)[-1]

    def _choices(self, axis: str, values: Sequence[str], fixed: Mapping) -> Sequence[str]:
        if axis in self.about.sizes:
            return ("given",) if fixed.get(axis) else ("",)
        if fixed.get(axis) is None:
            return values
        return (values[0], fixed[axis]) if axis in self.loose else (fixed[axis],)

    def _variant(self, place: int, values: Mapping) -> Variant:
        return next(v for n in self.arguments[place].library
                    for v in self.about.buffers.get(n, ()) if v.holds(values))

    def _has_form(self, place: int, tensor: Tensor, values: Mapping, dtype) -> bool:
        variant = self._variant(place, values)
        leads = self.about.leads(variant.shape)
        if not leads and tensor.dim() != len(variant.shape):
            return False
        kind = self.arguments[place].kind
        return kind.one_type or (variant.dtype == "T") == (tensor.dtype is dtype) or \
            dtype is torch.float32

    def _bind(self, there: Mapping[int, Tensor], values: Mapping, sizes: dict) -> None:
        """Finds the sizes, from the arguments in their order, and checks all extents."""
        shapes = {i: self._variant(i, values).shape for i in sorted(there)}
        lead = None
        for _ in range(2):
            for i, shape in shapes.items():
                extents = list(there[i].shape)
                if self.about.leads(shape):
                    own = extents[:len(extents) - len(shape) + 1]
                    lead = own if lead is None else lead
                    sizes.setdefault("m", math.prod(lead))
                    shape, extents = shape[1:], extents[len(own):]
                for text, extent in zip(shape, extents):
                    _solve(text, extent, sizes)
        for i, shape in shapes.items():
            extents = [*lead, *shape[1:]] if self.about.leads(shape) else shape
            right = tuple(_value(e, sizes) if isinstance(e, str) else e for e in extents)
            name = "a gradient to add to" if self.arguments[i].adds else self.arguments[i].name
            expect(self.label, name, there[i], right)


def _solve(text: str, extent: int, sizes: dict) -> None:
    """Adds the one size that a linear formula of a tensor's extent does not know."""
    unknown = [s for s in _symbols(text) if s not in sizes]
    if len(unknown) == 1 and "//" not in text and "ceil" not in text:
        name, = unknown
        start = _value(text, {**sizes, name: 0})
        step = _value(text, {**sizes, name: 1}) - start
        sizes[name] = (extent - start) // step


class _Allocations:
    """Python's text for what allocates each result of an op, in terms of its arguments."""

    def __init__(self, form: "DerivedForm"):
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
        return re.sub(r"[a-z_]+", lambda found: self._size(found[0]), _python(text))

    def _size(self, size: str) -> str:
        for argument in self.form.arguments:
            if not argument.kind and argument.library[0].replace("-", "_") == size:
                return argument.name
        for name, shape in self.needed:
            if size == "m" and self.about.leads(shape):
                # Size.numel() would make a constant of a symbolic size.
                return f"prod({name}.shape[:{name}.dim() - {len(shape) - 1}])"
            for axis, text in enumerate(shape):
                if _symbols(text) == (size,) and (size != "m" or axis):
                    step = _value(text, {size: 1})
                    part = f" // {step}" if step > 1 else ""
                    return f"({name}.shape[{axis - len(shape)}]{part})"
        raise AssertionError(f"{self.form.op}: no argument has the size {size}")


def _results(text: str, arguments: Sequence[Argument]) -> list[Result]:
    places = {a.name: i for i, a in enumerate(arguments)}
    found = []
    for one in re.split(r",\s*", text):
        name, library, like, given = _RESULT.fullmatch(one).groups()
        found.append(Result(tuple((library or name).split("|")), places.get(like), places.get(given)))
    return found


_CASTS = {"row": "{0} if {0}.dtype is {typed}.dtype else float32(label, '{0}', {0})",
          "floats": "float32(label, '{0}', {0})", "ints": "int32(label, '{0}', {0})"}


def _texts(name: str, form: DerivedForm, prepare: Mapping, as_list: bool) -> str:
    """Python's text of an op's kernel and of its fake kernel."""
    arguments, results = form.arguments, form.results
    allocations, typed = _Allocations(form), arguments[form.typed].name
    signature = ", ".join(a.name for a in arguments)
    casts, allocated, allocated_fakes, back = [], [], [], []
    run_names = [a.name for a in arguments]
    for i, a in enumerate(arguments):
        text = (f"prepare['{a.name}']({a.name}, ({signature},))" if a.name in prepare else
                _CASTS[a.cast].format(a.name, typed=typed) if a.cast in _CASTS else "")
        if text:
            run_names[i] = f"{a.name}_"
            casts.append(f"{a.name}_ = {text}")
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
    fake_casts = [line if line.startswith(tuple(f"{arguments[r.like].name}_ =" for r in results
                                                if r.like is not None)) else "" for line in casts]
    bodies = {name: [*casts, *allocated, call, *back, *absent, f"return {returned}"],
              f"{name}_fake": [*filter(None, fake_casts), *allocated_fakes, *back, *absent,
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
    "Tensor[]". The other options are those of `define`.
    """
    about = Description(of, back, fixed)
    label = label or of
    declared = _arguments(arguments, about, {})
    made = _results(results, declared)
    form = DerivedForm(label, about, declared, made, check, words, loose)
    functions = {"form": form, "label": label, "prepare": prepare, "prod": math.prod, "run": run,
                 "empty_like": torch.empty_like,
                 "float32": float32, "int32": int32, "expect_in_place": _expect_in_place, **_TORCH}
    exec(_texts(name, form, prepare, returns == "Tensor[]"), functions)
    if not returns:
        returns = "Tensor" if len(made) == 1 else f"({', '.join(['Tensor'] * len(made))})"
    _define(name, declared, label, returns, keeps, **rules)(functions[name])
    fake(name)(functions[f"{name}_fake"])
    return form


def _expect_in_place(label: str, tensors: Sequence[Tensor | None]) -> None:
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous()
                                   or tensor.is_cuda and tensor.data_ptr() & 15):
            raise Error(f"{label}: a gradient to add to is not contiguous, or not at an address of "
                        "16 bytes")
