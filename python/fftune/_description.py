"""The registry's description of ops, and the words of declarations (`_declare.py`) in its terms.

`_op_table.json`, which the build writes, has each op's sizes, options and buffers: their element types,
their extents as formulas of the sizes, and the options with which they are there.
"""
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

from . import _built  # noqa: F401: the table is there
from ._checks import DATA, FP8, KINDS, Kind

_TABLE = json.loads(Path(__file__).with_name("_op_table.json").read_text())
_EXACT = {"T": DATA, "fp8": FP8, "f32": KINDS["f32"], "i32": KINDS["i32"], "i64": KINDS["i64"],
          "u8": KINDS["u8"]}
_VALUES = ("str", "bool", "int", "float", "float[]")
_ARGUMENT = re.compile(r"(-?)(\w+)(?:=([\w|-]+))?(?::([\w\[\]]+))?(\??)(!?)")
_RESULT = re.compile(r"(-?)(\w+)(?:=([\w|-]+))?(?::(\w+))?(?:\?(\w+))?")


def python_of(text: str) -> str:
    """An extent such as "4 * ceil(s / 128)" as Python has it."""
    text = re.sub(r"ceil\((.+?) / (.+?)\)", r"-(-(\1) // (\2))", text)
    return re.sub(r"(?<=[a-z])-(?=[a-z])", "_", text)


@functools.cache
def _formula(text: str):
    return compile(python_of(text), "<extent>", "eval")


def value_of(text: str, sizes: Mapping):
    return eval(_formula(text), {}, sizes)


def symbols_of(text: str) -> tuple[str, ...]:
    return _formula(text).co_names


@functools.cache
def has_option(op: str, pass_: str, name: str) -> bool:
    return any(own == name and where in ("", pass_) for own, where, *_ in _TABLE[op]["options"])


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

    @classmethod
    @functools.cache
    def of(cls, op: str, back: bool, fixed: tuple[tuple[str, str], ...], declared: str) -> "Description":
        return cls(op, back, dict(fixed), declared)

    def __init__(self, op: str, back: bool, fixed: Mapping[str, str], declared: str):
        """`declared` is the text of the arguments: some may be options."""
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
        # Codes in the place of numbers have declarations of their own, which fix the options that decide.
        told = {**{axis: choices[0] for axis, choices in self.options.items() if isinstance(choices, list)
                   and axis not in _options_in(declared) and self._makes_codes(axis, choices[0])},
                **self.fixed}
        for name, role, dtype, shape, when in table[self.back]:
            if all(told.get(axis, allowed[0]) in allowed for axis, allowed in when.items()):
                self.buffers.setdefault(name, []).append(Variant(dtype, tuple(shape), when))
                if role in ("input", "updated"):
                    self.inputs.add(name)

    def _makes_codes(self, axis: str, usual: str) -> bool:
        """Whether an input has numbers where this option has its usual value, and else codes."""
        rows = [(name, dtype, when) for name, role, dtype, _, when in _TABLE[self.op][self.back]
                if role == "input" and axis in when]

        def differs_by_axis(when: Mapping, other: Mapping) -> bool:
            return usual not in when[axis] and usual in other[axis] and all(
                {*when[a]} & {*other[a]} for a in when.keys() & other.keys() - {axis})

        return any(dtype in ("fp8", "u8") and of == name and own == "T" and differs_by_axis(when, other)
                   for name, dtype, when in rows for of, own, other in rows)

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
    shown: str  # in errors
    library: tuple[str, ...]
    type: str  # of the schema
    kind: Kind | None  # of a tensor
    cast: str
    optional: bool = False
    written: bool = False
    hidden: bool = False  # from the schema
    leads: bool = False  # with the tokens, whichever of its layouts it has

    @property
    def adds(self) -> bool:
        """Whether results are added to it."""
        return self.written and self.library[0].endswith("_before")


def _options_in(declared: str) -> set[str]:
    """The library's names of the arguments, without those that are tensors by their kind."""
    arguments = (_ARGUMENT.fullmatch(one).groups() for one in re.split(r",\s*", declared))
    return {option for _, name, library, kind, *_ in arguments if kind not in KINDS
            for option in (library or name.replace("_", "-")).split("|")}


def _only(dtypes: set, name: str) -> str:
    if len(dtypes) > 1:
        raise ValueError(f"{name} is of {' or '.join(sorted(dtypes))}: fix the options that decide")
    return next(iter(dtypes))


def _argument(text: str, about: Description, shapes: Mapping[str, str],
              names: Mapping[str, str]) -> Argument:
    hidden, name, library, kind, optional, written = _ARGUMENT.fullmatch(text).groups()
    libraries = tuple((library or name).split("|"))
    shown = names.get(name, name)
    field = library or name.replace("_", "-")
    if kind in _VALUES or not any(n in about.inputs for n in libraries) and kind not in KINDS:
        if not kind:
            kind = ("float" if about.options[field] == "number" else "str") if (
                field in about.options) else "int"
        fields = libraries if kind == "float[]" else (field,)
        return Argument(name, shown, fields, kind, None, "")
    variants = [v for n in libraries for v in about.buffers.get(n, ())]
    if kind in KINDS:
        types = KINDS[kind]
    else:
        dtypes = {v.dtype for v in variants}
        types = (KINDS["index"] if dtypes == {"i32", "i64"} else
                 FP8 if "T" in dtypes and about.fixed["dtype"] == "fp8" else
                 DATA if "T" in dtypes else _EXACT[_only(dtypes - {"f32"} or dtypes, name)])
    ranks = {len(v.shape) for v in variants}
    leads = all(about.leads(v.shape) for v in variants)
    if name in shapes:
        shape, leads = shapes[name], shapes[name].startswith("[...")
    else:
        shape = "[...]" if len(ranks) > 1 else about.words(variants[0].shape)
    return Argument(name, shown, libraries, "Tensor", Kind(types, shape), kind or "", bool(optional),
                    bool(written), bool(hidden), leads)


def arguments_of(text: str, about: Description, shapes: Mapping[str, str] = {},
                 names: Mapping[str, str] = {}) -> list[Argument]:
    """`shapes` has those of tensors that are not laid out as the library's, in words, and `names`
    what errors call an argument."""
    return [_argument(one, about, shapes, names) for one in re.split(r",\s*", text)]


@dataclass(frozen=True)
class Result:
    name: str
    library: tuple[str, ...]
    like: int | None  # the place of an argument
    given: int | None
    hidden: bool


def results_of(text: str, arguments: Sequence[Argument]) -> list[Result]:
    places = {a.name: i for i, a in enumerate(arguments)}
    found = []
    for one in re.split(r",\s*", text) if text else ():
        hidden, name, library, like, given = _RESULT.fullmatch(one).groups()
        found.append(Result(name, tuple((library or name).split("|")), places.get(like),
                            places.get(given), bool(hidden)))
    return found
