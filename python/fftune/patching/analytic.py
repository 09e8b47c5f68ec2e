"""The operations by which a module computes: what is known of it beyond the inputs that were tried.

Logits that are clamped at 30 equal plain ones up to there, so samples alone show nothing. But two
compositions of analytic functions (sums, products, quotients, exp, sigmoid, tanh, softmax, gelu) that agree on
random inputs agree on all: analytic functions that are equal on an open set are equal. A Trace lets them
through, with views, casts and indices. It counts all other operations as pieces: clamps, comparisons, choices,
roots, random numbers, numbers that Python reads, and operations that it does not know.

A module is taken for a computation only if its pieces are pieces of that computation too, with the same limits,
and as often for each matrix product: relu in an MLP of relu is one. Comparisons of the numbers of sequences and
tokens are pieces, if Python makes them. These stay unseen: sizes that Python reads by len() or as an index,
branches on the device, kernels that are called past PyTorch's dispatcher, and state from outside the module.
"""
import functools
import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._versions import DispatchKey, TorchDispatchMode

# Names of operations without the last underscore.
_ANALYTIC = frozenset("""
    add sub rsub mul div true_divide neg reciprocal square addcmul addcdiv lerp
    exp exp2 expm1 sin cos sinh cosh tanh sigmoid erf erfc silu gelu mish glu log_sigmoid_forward
    softmax _softmax _safe_softmax log_softmax _log_softmax logsumexp
    sum mean var var_mean prod cumsum
    convolution constant_pad_nd tril triu
    view _unsafe_view reshape _reshape_alias view_as expand permute transpose t unsqueeze squeeze slice select
    split split_with_sizes unbind unfold diagonal as_strided alias detach lift_fresh cat stack flip roll repeat
    repeat_interleave clone contiguous copy _to_copy to fill zero
    index index_select index_add index_copy index_put _index_put_impl gather scatter scatter_add where masked_fill
    embedding view_as_complex view_as_real
""".split())
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot linear matmul _grouped_mm".split())
# Attention by a kernel of PyTorch or fftune. Elsewhere it is two products, by the version and the shapes.
_ATTENTION = "_scaled_dot_product", "attention"
# Their results have only the shape of what they are given.
_SHAPES = frozenset("zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full "
                    "new_empty_strided".split())
ROOTS = frozenset("sqrt rsqrt log log1p log2 log10 std std_mean linalg_vector_norm native_layer_norm "
                  "_fused_rms_norm".split())
_ROOT = "a root or logarithm"
# Frequencies are powers of arange(). The largest of positions, say, is another for other positions that are tried.
_OF_INTEGERS = ROOTS | frozenset("pow max min amax amin".split())
_WORDS = {"_local_scalar_dense": "item"}
# They read a tensor's numbers past the dispatcher.
_READERS = frozenset("tolist numpy __array__ data_ptr __dlpack__ untyped_storage storage _typed_storage".split())

PATCHED = "fftune"  # operations of parts that were replaced, and so recognised
INTEGERS = "integers"  # operations on integers and booleans alone: choices that depend on ids, masks
CHOICES = frozenset((INTEGERS, "topk", "sort", "argsort", "argmax", "max", "amax"))  # of experts


class Trace:
    """The pieces of what runs in its context. `free` operations are none; of the numbers `sizes` each
    comparison is one."""

    def __init__(self, free: Iterable[str] = (), sizes: Iterable[int] = ()):
        self.free, self.sizes = frozenset(free), frozenset(sizes)
        self.pieces: Counter[str] = Counter()
        self.products = 0
        self.discrete: dict[int, torch.UntypedStorage] = {}  # that depend on shapes and integers alone
        self._modes = _Operations(self), _Methods(self)

    def __enter__(self) -> "Trace":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def unlike(self, other: "Trace") -> str | None:
        """A piece that the other has not, or has fewer times for each product."""
        return next((piece for piece, count in self.pieces.items() if count * max(other.products, 1)
                     > other.pieces[piece] * max(self.products, 1)), None)

    def reads_numbers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these depends on a floating-point number of an input or a parameter."""
        return any(_is_float(t) and t.untyped_storage()._cdata not in self.discrete for t in tensors)

    def follow(self, reads: bool, results: list[Tensor]) -> None:
        """Remembers which results read no such numbers: masks of experts, say."""
        for storage in (t.untyped_storage() for t in results if _is_float(t)):
            if reads:
                self.discrete.pop(storage._cdata, None)  # written in place
            else:
                self.discrete[storage._cdata] = storage


def _tensors(values: Iterable) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


@functools.cache
def _facts(function) -> tuple[str, bool, bool, int]:
    """The name of an operation; whether it is made of others, as under inference_mode; whether it is analytic
    whatever its arguments are; how many matrix products it has."""
    name = function._schema.name.partition("::")[2].rstrip("_")
    known = name in _ANALYTIC or name in _PRODUCTS
    return (name, not known and function.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd),
            known and name != "div", 2 if name.startswith(_ATTENTION) else int(name in _PRODUCTS))


class _Operations(TorchDispatchMode):
    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each call would take as long as the call

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name, is_composed, is_analytic, products = _facts(function)
        options = options or {}
        if is_composed:
            with self:
                return function.decompose(*arguments, **options)
        trace = self.trace
        trace.products += products
        if is_analytic and not trace.discrete and arguments and isinstance(arguments[0], Tensor) \
                and _is_float(arguments[0]):
            result = function(*arguments, **options)
            if isinstance(result, Tensor) and _is_float(result):
                return result
            given, reads = [arguments[0]], True
        else:
            given = _tensors((*arguments, *options.values()))
            reads = trace.reads_numbers(given)
            result = function(*arguments, **options)
        if (piece := _piece(function, name, arguments, options, given, reads, result, trace.free)) is not None:
            trace.pieces[piece] += 1
        trace.follow(reads and name not in _SHAPES, _tensors((result,)))
        return result


def _piece(function, name: str, arguments, options, given: list[Tensor], reads: bool, result,
           free: frozenset[str]) -> str | None:
    """The words for a call that is one; `reads` says whether it reads numbers of an input or a parameter."""
    own = {a.name: value for a, value in zip(function._schema.arguments, arguments)} | options
    if name.startswith(_ATTENTION[0]) and not own.get("dropout_p") \
            or function.namespace == PATCHED and PATCHED in free:
        return None
    if torch.Tag.nondeterministic_seeded in function.tags:
        return f"random numbers ({name})"
    if not given or name in _SHAPES or name in free:
        return None
    if not reads:
        return None if name in _ANALYTIC or name in _OF_INTEGERS or INTEGERS in free else _named(name, arguments)
    results = _tensors((result,))
    if not results or not all(map(_is_float, results)):
        return f"{name} to {_type_of(results)}" if name in _ANALYTIC else _named(name, arguments)
    if name in ("pow", "float_power"):
        return _power(arguments)
    if name in ROOTS and own.get("ord", 2) == 2:
        return _ROOT
    if name == "softplus":
        return None if own.get("threshold", 20) >= 20 else _named(name, arguments)
    if name == "div" and own.get("rounding_mode") is not None:
        return "div with rounding"
    if name in _ANALYTIC or name in _PRODUCTS:
        return None
    return _limits(name, own) if name in _LIMITS else _named(name, arguments)


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _type_of(results: list[Tensor]) -> str:
    return str(next((t.dtype for t in results if not _is_float(t)), "a number of Python"))


def _named(name: str, arguments) -> str:
    numbers = ", ".join(f"{n:g}" for n in arguments if isinstance(n, (int, float)))
    return f"{_WORDS.get(name, name)}({numbers})"


def _power(arguments) -> str | None:
    base, exponent = arguments[:2]
    if isinstance(base, (int, float)) and base > 0 or isinstance(exponent, (int, float)) and exponent == int(exponent):
        return None
    return _ROOT if isinstance(exponent, (int, float)) else "pow()"


_INFINITE = float("inf")
# Operations that clamp, with the limits that they have by default; others are arguments of these names.
_LIMITS = {"clamp": {"min": -_INFINITE, "max": _INFINITE}, "clip": {"min": -_INFINITE, "max": _INFINITE},
           "clamp_min": {"min": None, "": _INFINITE}, "clamp_max": {"": -_INFINITE, "max": None},
           "maximum": {"other": None, "": _INFINITE}, "minimum": {"": -_INFINITE, "other": None},
           "hardtanh": {"min_val": -1.0, "max_val": 1.0}, "relu": {"": 0.0, " ": _INFINITE},
           "relu6": {"": 0.0, " ": 6.0}}


def _limits(name: str, own: dict) -> str | None:
    """clamp() with these limits, or none where they are infinite."""
    limits = tuple(default if own.get(limit) is None else own[limit] for limit, default in _LIMITS[name].items())
    if any(isinstance(limit, Tensor) and limit.numel() > 1 for limit in limits):
        return f"{name}()"
    limits = tuple(map(float, limits))
    return None if limits == (-_INFINITE, _INFINITE) else "clamp({:g}, {:g})".format(*limits)


class _Methods(TorchFunctionMode):
    """Sees what does not reach the dispatcher: sizes, and numbers that are read from memory."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        name = getattr(function, "__name__", "")
        if name in _READERS:
            if INTEGERS not in self.trace.free or self.trace.reads_numbers(_tensors(arguments)):
                self.trace.pieces[f"{name}()"] += 1
        elif self.trace.sizes:
            if isinstance(result, torch.Size):
                return torch.Size(map(self._size, result))
            if type(result) is int and name in ("size", "numel", "nelement"):
                return self._size(result)
        return result

    def _size(self, size: int) -> int:
        return _Size.of(size, self.trace) if size in self.trace.sizes else size


class _Size(int):
    """A number of sequences or tokens, or one computed from it. A comparison is a piece, but for those of two sizes
    and of a size with 0; so is a conversion, behind which comparisons would not be seen."""

    trace: Trace
    is_computed = False

    @classmethod
    def of(cls, size: int, trace: Trace, is_computed: bool = False) -> "_Size":
        made = cls(size)
        made.trace, made.is_computed = trace, is_computed
        return made

    def count(self) -> None:
        self.trace.pieces["a comparison of the number of sequences or tokens"] += 1

    def __bool__(self) -> bool:
        if self.is_computed:
            self.count()
        return int.__bool__(self)

    __hash__ = int.__hash__


def _plain(number):
    return int.__add__(number, 0) if isinstance(number, _Size) else number


def _counted(operation):
    def compute(self, *others):
        is_equality = operation in (operator.eq, operator.ne) and isinstance(others[0], _Size)
        if not (is_equality or others and _plain(others[0]) == 0 and not self.is_computed):
            self.count()
        return operation(_plain(self), *map(_plain, others))
    return compute


def _computed(operation, turned: bool):
    def compute(self, other):
        if not isinstance(other, int):
            return NotImplemented
        numbers = (_plain(self), _plain(other))
        return _Size.of(operation(*(numbers[::-1] if turned else numbers)), self.trace,
                        self.is_computed or operation is not operator.mul)
    return compute


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "mod", "truediv", "pow"):
    setattr(_Size, f"__{_name}__", _counted(getattr(operator, _name)))
for _name, _operation in (("int", int), ("float", float), ("divmod", divmod), ("rtruediv", lambda a, b: b / a)):
    setattr(_Size, f"__{_name}__", _counted(_operation))
for _name in ("add", "sub", "mul", "floordiv"):
    setattr(_Size, f"__{_name}__", _computed(getattr(operator, _name), False))
    setattr(_Size, f"__r{_name}__", _computed(getattr(operator, _name), True))
