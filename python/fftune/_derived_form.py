"""The problem of a call of a declared op: a Form that follows from the registry's description."""
import itertools
import math
from typing import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ._checks import DATA, DTYPE_NAMES, FP8, TORCH_DTYPES, check_number, check_tensors, expect, expect_one_of
from ._description import Argument, Description, Result, Variant, symbols_of, value_of
from ._library import Error


class DerivedForm:
    """A Form as in fftune._run, without code for each op: the sizes follow from the tensors' extents,
    and the options from the tensors that are there, their types and the results.

    The options of a run are the values of the arguments that are no tensors, then the strides of
    the tensors in `lays`, and the places of the results that the call has.
    """

    def __init__(self, label: str, about: Description, arguments: Sequence[Argument],
                 results: Sequence[Result], returns: str = "", *, check: Callable | None = None,
                 fill: Callable | None = None, words: Mapping[str, dict] = {},
                 loose: Sequence[str] = (), lays: Mapping[str, tuple] = {},
                 prepare: Mapping[str, Callable] = {}, sizes: Mapping[str, Callable] = {},
                 kernel: Callable | None = None):
        self.op, self.about, self.label = about.op, about, label
        self.arguments, self.results, self.check, self.fill = arguments, results, check, fill
        self.words, self.loose, self.kernel = words, loose, kernel
        self.lays, self.prepare, self.sizes = lays, prepare, sizes
        self.declared = [a for a in arguments if not a.hidden]  # of PyTorch's op
        made = [r for r in results if not r.hidden]
        self.returns = returns or ("Tensor" if len(made) == 1 else f"({', '.join(['Tensor'] * len(made))})")
        self.strides = [name for _, names in lays.values() for name in names]
        self.strided = bool(lays)  # its inputs are as the kernels read them, which take the strides
        order = list(about.buffers)
        tensors = [i for i, a in enumerate(arguments) if a.kind]
        self.places = sorted(tensors, key=lambda i: order.index(arguments[i].library[0]))
        self.fields = [i for i, a in enumerate(arguments) if not a.kind]
        self.kinds = {a.name: a.kind for a in arguments if a.kind}
        self.first = tensors[0]
        # The argument whose element type is the problem's; of masks alone None.
        self.typed = next((i for i in self.places if arguments[i].kind.types in (DATA, FP8)), None)
        self.axes = {axis for variants in about.buffers.values() for v in variants for axis in v.when}
        self.found: dict[tuple, list[dict[str, str]]] = {}

    def problem(self, options: tuple, inputs: Sequence[Tensor | None]) -> dict | None:
        values, present = options
        given = dict(zip(self.places, inputs))
        # Nothing depends on the type where there are masks alone: the device's first one.
        dtype = (given[self.typed].dtype if self.typed is not None else
                 torch.bfloat16 if given[self.first].is_cuda else torch.float32)
        named = {self.arguments[i].name: given.get(i) for i in sorted(self.places)}
        for i in self.places:
            if given.get(i) is None and not self.arguments[i].optional:
                raise Error(f"{self.label}: {self.arguments[i].name} is None: give a tensor")
        check_tensors(self.label, self.kinds, list(named.items()), dtype)
        named |= {self.arguments[i].name: value for i, value in zip(self.fields, values)}
        if self.check:  # in Python's words, before the library's
            self.check(**named)
        fields = {}
        for i, value in zip(self.fields, values):
            argument = self.arguments[i]
            several = value if argument.type == "float[]" else (value,)
            for name, one in zip(argument.library, several):
                fields[name] = self._field(argument, name, one)
        fields |= zip(self.strides, values[len(self.fields):])
        if self.fill:
            self.fill(fields, **named)
        there = {i: t for i, t in given.items() if t is not None}
        found, sizes = self._best(there, fields, present, dtype)
        self._expect_own_bytes(there, found, dtype)
        if not (sizes["m"] if self.about.tokens == "m" else given[self.first].numel()):
            return None
        problem = {"op": self.op, "pass": self.about.back, "dtype": DTYPE_NAMES[dtype]}
        for name in self.about.sizes:
            size = sizes.get(name.replace("-", "_"))
            if size is not None:
                problem[name] = size
        # Options on which buffers depend are left out where they have their usual values.
        own = {n: found[n] for n in self.axes if found[n] != self.about.usual[n]}
        free = {n: value for n, value in fields.items() if n not in self.axes}
        for name, value in {**self.about.fixed, **free, **own}.items():
            if name in self.about.options and value is not None:
                problem[name] = value
        return problem

    def _expect_own_bytes(self, there: Mapping[int, Tensor], values: Mapping, dtype) -> None:
        """That the kernels read elements of the tensors' sizes, where options decide about types."""
        for i, tensor in there.items():
            declared = self._variant(i, values).dtype
            own = dtype if declared == "T" else TORCH_DTYPES[declared]
            if tensor.element_size() != own.itemsize:
                raise Error(f"{self.label}: {self.arguments[i].shown} is {tensor.dtype}: give {own}, as the other "
                            "tensors ask for")

    def _field(self, argument: Argument, name: str, value):
        """An option or a size as the library takes it, None if it is left out."""
        if argument.name in self.words:
            return self.words[argument.name][value]
        if isinstance(value, bool):
            return "yes" if value else "no"
        choices = self.about.options.get(name, "size")
        if choices == "number":
            check_number(self.label, argument.name if argument.type != "float[]" else name, value)
            return f"{float(value):.12g}"
        if isinstance(choices, list) and value is not None:
            expect_one_of(f"{self.label}: {argument.shown}", value, choices)
        return value or None if choices in ("pattern", "size") else value

    def _best(self, there: Mapping[int, Tensor], fields: Mapping, present: tuple[int, ...],
              dtype: torch.dtype) -> tuple[dict, dict]:
        """The values of options for which the op has these tensors and the results, and the sizes:
        the usual ones first, of those that the tensors' extents allow."""
        sizes = {n.replace("-", "_"): v for n, v in fields.items()
                 if n in self.about.sizes and v is not None}
        fixed = {n: v for n, v in fields.items() if n in self.axes and n not in self.about.fixed}
        key = (tuple((i, t.dtype is dtype, t.dtype, t.dim()) for i, t in there.items()),
               tuple((n, v is not None if n in self.about.sizes else v) for n, v in fixed.items()), present)
        if key not in self.found:
            self.found[key] = self._search(there, fixed, present, dtype)
        wrong = []
        for values in self.found[key]:
            own = dict(sizes)
            faults = [fault for fault in self._bind(there, values, own) if fault]
            if not faults:
                return values, own
            wrong.append(faults)
        place, extents = min(wrong, key=len)[0]
        argument = self.arguments[place]
        expect(self.label, "a gradient to add to" if argument.adds else argument.shown, there[place],
               extents)

    def _search(self, there, fixed: Mapping, present, dtype) -> list[dict[str, str]]:
        """All that is possible, the best first."""
        needed = [(self.arguments[i].library, i) for i in there] + [
            (self.results[k].library, None) for k in present] + [
            ((self.arguments[i].library[0].removesuffix("_before"),), None)
            for i in there if self.arguments[i].adds]
        for by_form in (True, False):
            domains = self._narrowed(needed, there, fixed, dtype, by_form)
            fitting = []
            for values in itertools.product(*domains.values()):
                values = {**self.about.usual, **dict(zip(domains, values))}
                names = {n for n, vs in self.about.buffers.items() if any(v.holds(values) for v in vs)}
                if len(names) == len(needed) and all(names.intersection(n) for n, _ in needed):
                    misfits = sum(not self._has_form(i, self._variant(i, values), t, dtype)
                                  for i, t in there.items())
                    fitting.append((misfits, len(fitting), values))
            if fitting:
                return [values for _, _, values in sorted(fitting)]
        words = ", ".join(self.arguments[i].name for i in sorted(there))
        raise Error(f"{self.label}: {words} do not go together: leave out those that belong to others")

    def _narrowed(self, needed, there, fixed: Mapping, dtype, by_form: bool) -> dict[str, list[str]]:
        """The values of each axis that leave every needed buffer possible, and no other certain."""
        domains = {axis: self._choices(axis, fixed) for axis in sorted(self.axes)}
        possible = {name for library, _ in needed for name in library}
        others = [v for name, vs in self.about.buffers.items() if name not in possible for v in vs]
        before = None
        while domains != before:
            before = {axis: list(values) for axis, values in domains.items()}
            for library, place in needed:
                variants = [v for name in library for v in self.about.buffers.get(name, ())
                            if all(set(allowed) & set(domains[a]) for a, allowed in v.when.items())]
                if by_form and place is not None:
                    variants = [v for v in variants
                                if self._has_form(place, v, there[place], dtype)] or variants
                for axis in set.intersection(*(set(v.when) for v in variants)) if variants else ():
                    allowed = {value for v in variants for value in v.when[axis]}
                    domains[axis] = [value for value in domains[axis] if value in allowed]
            for variant in others:
                deciding = [axis for axis, allowed in variant.when.items()
                            if not set(domains[axis]) <= set(allowed)]
                if len(deciding) == 1:
                    axis, = deciding
                    domains[axis] = [v for v in domains[axis] if v not in variant.when[axis]]
        return domains

    def _choices(self, axis: str, fixed: Mapping) -> list[str]:
        values = list(self.about.domain(axis))
        if axis in self.about.sizes:  # is given wherever a tensor has it
            return values[::-1] if axis not in fixed else ["given" if fixed[axis] is not None else ""]
        if fixed.get(axis) is None:
            return values
        return [values[0], fixed[axis]] if axis in self.loose else [fixed[axis]]

    def _variant(self, place: int, values: Mapping) -> Variant:
        return next(v for n in self.arguments[place].library
                    for v in self.about.buffers.get(n, ()) if v.holds(values))

    def leads(self, place: int, shape: Sequence[str]) -> bool:
        """Whether any leading dimensions may stand for the first extent of this argument."""
        words = self.arguments[place].kind.shape
        return self.about.leads(shape) or words.startswith("[...,") and \
            words.count(",") + 1 == len(shape)

    def _has_form(self, place: int, variant: Variant, tensor: Tensor, dtype) -> bool:
        if not self.leads(place, variant.shape) and tensor.dim() != len(variant.shape):
            return False
        own = dtype if variant.dtype == "T" else TORCH_DTYPES[variant.dtype]
        return self.arguments[place].kind.one_type or tensor.dtype is own

    def _bind(self, there: Mapping[int, Tensor], values: Mapping, sizes: dict) -> Iterator:
        """Finds the sizes, from the arguments in their order. Gives the place and the right shape of
        each tensor whose shape is not that."""
        shapes = {i: self._variant(i, values).shape for i in sorted(there)}
        lead = None
        for _ in range(2):
            for i, shape in shapes.items():
                extents = list(there[i].shape)
                if self.leads(i, shape):
                    own = extents[:len(extents) - len(shape) + 1]
                    lead = own if lead is None and self.about.leads(shape) else lead
                    extents[:len(own)] = [math.prod(own)]
                for text, extent in zip(shape, extents):
                    _solve(text, extent, sizes)
        for i, shape in shapes.items():
            extents = there[i].shape
            if any(size not in sizes for text in shape for size in symbols_of(text)):
                yield i, ()
                continue
            right = [value_of(text, sizes) for text in shape]
            if self.about.leads(shape):
                right[:1] = lead
            elif self.leads(i, shape):
                own = extents[:len(extents) - len(shape) + 1]
                right[:1] = own if math.prod(own) == right[0] else right[:1]
            if tuple(right) != tuple(extents):
                yield i, tuple(right)


def _solve(text: str, extent: int, sizes: dict) -> None:
    """Adds the one size that a linear formula of a tensor's extent does not know."""
    unknown = [s for s in symbols_of(text) if s not in sizes]
    if len(unknown) == 1 and "//" not in text and "ceil" not in text:
        name, = unknown
        start = value_of(text, {**sizes, name: 0})
        step = value_of(text, {**sizes, name: 1}) - start
        sizes[name] = (extent - start) // step if step else 0
