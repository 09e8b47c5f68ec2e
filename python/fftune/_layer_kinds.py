"""Layers of several kinds, such as linear and full attention, in one string for the op `decode`: the form of each kind,
and the kind of each layer."""
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ._layer_form import LayerForm, parse

MOST_KINDS = 3


@dataclass(frozen=True)
class Kinds:
    """The forms of the kinds, and the kind of each layer; none where all layers are alike."""

    forms: tuple[str, ...]
    order: tuple[int, ...] = ()

    @property
    def parsed(self) -> tuple[LayerForm, ...]:
        return tuple(parse(form) for form in self.forms)

    def text(self) -> str:
        if not self.order:
            return self.forms[0]
        return " | ".join(self.forms) + " @ " + "".join(chr(ord("a") + kind) for kind in self.order)

    def layers(self, weights: Sequence[Tensor], caches: Sequence[Tensor]) -> Iterator[tuple[int, list, list]]:
        """The kind of each layer, its weights, and its caches or states."""
        forms = self.parsed
        order = self.order or (0,) * (len(caches) // forms[0].states)
        at = first = 0
        for kind in order:
            end, last = at + len(forms[kind].weights), first + forms[kind].states
            yield kind, list(weights[at:end]), list(caches[first:last])
            at, first = end, last

    def counts(self) -> tuple[int, int] | None:
        """How many weights, and caches or states, all layers have; None where their number is not known."""
        if not self.order:
            return None
        forms = self.parsed
        return sum(len(forms[kind].weights) for kind in self.order), sum(forms[kind].states for kind in self.order)

    def angles_behind(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The angles of the kinds behind the first one, given those of the kinds that rotate; None where all kinds have
        the same."""
        left = iter(given)
        found = [next(left) if given and form.rotates else None for form in self.parsed[1:]]
        return found + [None] * (MOST_KINDS - 1 - len(found))

    @property
    def pattern(self) -> str:
        """The shortest letters that give the kinds when they are repeated."""
        letters = "".join(chr(ord("a") + kind) for kind in self.order)
        length = next(n for n in range(1, len(letters) + 1) if all(map(str.__eq__, letters[n:], letters)))
        return letters[:length]


@functools.lru_cache(256)
def parse_kinds(form: str) -> Kinds:
    forms, _, letters = form.partition(" @ ")
    return Kinds(tuple(forms.split(" | ")), tuple(ord(letter) - ord("a") for letter in letters))


# Fields of the op that all kinds of layers share.
_OF_ALL = ("batch", "d", "s", "cache", "page", "pages", "layers", "lengths")


def fields_of(values: dict) -> str:
    """The mixer of layers, and their other sizes and options, as one text."""
    shown = {name: f"{value:.12g}" if isinstance(value, float) else value for name, value in values.items()
             if value is not None and name not in _OF_ALL}
    mixer = shown.pop("mixer", "attention")
    return f"{mixer}:" + ",".join(sorted(f"{name}={value}" for name, value in shown.items()))
