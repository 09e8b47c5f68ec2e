"""The problem of a call of a declared op: a Form that follows from the registry's description."""
import itertools
import math
from typing import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import DATA, DTYPE_NAMES, FP8, check_number, check_tensors, expect
from ._description import Argument, Description, Result, Variant, symbols_of, value_of
from ._library import Error


class DerivedForm:
    """A Form as in fftune._run, without code for each op: the sizes follow from the tensors' extents,
    and the options from the tensors that are there, their types and the results.

    The options of run() are the values of the arguments that are no tensors, and the places of the
    results that the call has.
    """

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
        for i in self.places:
            if given.get(i) is None and not self.arguments[i].optional:
                raise Error(f"{self.label}: {self.arguments[i].name} is None: give a tensor")
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
            right = tuple(value_of(e, sizes) if isinstance(e, str) else e for e in extents)
            name = "a gradient to add to" if self.arguments[i].adds else self.arguments[i].name
            expect(self.label, name, there[i], right)


def _solve(text: str, extent: int, sizes: dict) -> None:
    """Adds the one size that a linear formula of a tensor's extent does not know."""
    unknown = [s for s in symbols_of(text) if s not in sizes]
    if len(unknown) == 1 and "//" not in text and "ceil" not in text:
        name, = unknown
        start = value_of(text, {**sizes, name: 0})
        step = value_of(text, {**sizes, name: 1}) - start
        sizes[name] = (extent - start) // step
