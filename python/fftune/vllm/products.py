"""Linear layers of vLLM that run one op of fftune: the op of vLLM's traces, the test of a layer, and the key of
vLLM's compiled code. So are networks.

A layer serves calls of every number of tokens, so its weight is in memory once. In a trace a layer is one op with
the layer's tensors and the name of its kind, so the layers of a model share compiled code.

A step runs all linear layers of a decoder layer. So the first module of each kind waits, with vLLM's tensors, until a
kind comes again. Then those that wait are timed together, one after the other, and all of them run here where that is
faster. Otherwise each kind is timed by itself, as are kinds that come later.
"""
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import _run as running
from .._untouched import same_random_numbers
from ..ops import PackedWeight
from . import faster, plans
from .deployment import current, offloads_weights
from .logs import Unfit, log_once, reason_of
from .trial import difference

# The attribute of a linear layer that runs with a packed weight, and of experts that do.
PACKED = "_fftune_packed"


class Halves(NamedTuple):
    """The packed weights of a network's gate and up, which vLLM has as one."""

    gate: PackedWeight
    up: PackedWeight


class Product(NamedTuple):
    """The result of a layer or a network: run(x, *tensors, bias) is [..., n] for x [..., k]. Layers of one `kind` differ
    in their tensors alone."""

    kind: str
    run: Callable
    tensors: tuple[Tensor | None, ...]
    n: int
    k: int


class _Kind(NamedTuple):
    run: Callable
    problems: list[tuple[int, dict]]  # as plans.prepare() takes them
    most: int


_kinds: dict[str, _Kind] = {}
_adopted: dict[int, str] = {}  # the kinds of modules by their numbers, in the order of loading; "" if vLLM's
_ROWS = (4, 300)  # for kernels of few tokens, and of many
_TIMED = (1, 16, 64, 256, 2048)
_choices: dict[str, faster.Choice] = {}  # by kind; kinds that were timed together have one

# Without torch.library.custom_op, whose wrappers cost a host more than the rest of a call.
_library = torch.library.Library("fftune_vllm", "DEF")
_library.define("run(Tensor x, Tensor?[] tensors, Tensor? bias, str kind, int n) -> Tensor",
                tags=(torch.Tag.pt2_compliant_tag,))


def _run(x, tensors, bias, kind, n):
    run, problems, most = _kinds[kind]
    rows = x.numel() // x.shape[-1]
    if rows > plans.EXACT:
        plans.prepare(rows, problems, most)
    return run(x, *tensors, bias)


for _backend in ("CPU", "CUDA"):
    _library.impl("run", _run, _backend)


@torch.library.register_fake("fftune_vllm::run", lib=_library)
def _(x, tensors, bias, kind, n):
    return x.new_empty(*x.shape[:-1], n)


@same_random_numbers()
def serve(module: nn.Module, product: Product, own: Callable[[Tensor], Tensor], dtype: torch.dtype, most: int) -> None:
    """Gives the module the tensors of a product that computes what `own(x)` does for x of the type `dtype`; Unfit if it
    computes something else. `most`: tokens of a batch."""
    kind, run, tensors, n, k = product
    if offloads_weights(current()):  # those that run here stay on the device
        raise Unfit("weights that are offloaded")
    number = module.__dict__.setdefault("_fftune_number", len(_adopted))  # a layer may be loaded again
    _adopted[number] = ""
    _expect_keyed()
    problems: dict = {}
    device = _device_of(product)
    generator = torch.Generator(device).manual_seed(0)
    for rows in _ROWS:
        x = torch.randn(rows, k, generator=generator, device=device, dtype=dtype)
        problems.clear()
        with running.listening(problems):
            y = run(x, *tensors, None)
        reason = difference("results", y, own(x))
        if reason:
            raise Unfit(reason)
    _kinds[kind] = _Kind(run, list(problems.values()), most)
    register(module, tensors)
    _adopted[number] = kind


def _device_of(product: Product) -> torch.device:
    return next(tensor.device for tensor in product.tensors if tensor is not None)


def _is_measured(product: Product) -> bool:
    return _device_of(product).type == "cuda"


class _Candidate(NamedTuple):
    """A layer that computes what vLLM's kernel does; which of them is faster decides about it."""

    product: Product
    own: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    decided: Callable[[str], None]  # with the reason why it stays vLLM's, or ""


_waiting: dict[str, _Candidate] = {}  # by kind


def _compete(candidate: _Candidate) -> None:
    """Decides about a layer, or lets it wait for the others of its decoder layer."""
    kind = candidate.product.kind
    if not _is_measured(candidate.product):
        return candidate.decided("")
    if kind not in _choices:
        if kind not in _waiting and not _choices:
            _waiting[kind] = candidate
            return
        decide()
        if kind not in _choices:
            _choices[kind] = _choice_of([candidate])
    _tell(candidate)


def decide() -> None:
    """Decides about the layers that wait. vLLM traces a model when all of its layers are loaded, so none may wait then."""
    waiting = [*_waiting.values()]
    _waiting.clear()
    try:
        together = _choice_of(waiting) if waiting else None
        for candidate in waiting:
            _choices[candidate.product.kind] = together if together.is_faster_everywhere() else _choice_of([candidate])
    except Exception as error:
        for candidate in waiting:
            candidate.decided(reason_of(error))
        return
    for candidate in waiting:
        _tell(candidate)


def _tell(candidate: _Candidate) -> None:
    choice = _choices[candidate.product.kind]
    candidate.decided("" if choice.is_faster_everywhere() else
                      f"vLLM's kernel is faster; its time divided by fftune's, by tokens: {choice.words()}")


@same_random_numbers()
def _choice_of(candidates: list[_Candidate]) -> faster.Choice:
    """The times of linear layers that run one after the other."""
    def both(rows: int):
        given = [torch.randn(rows, one.product.k, device=_device_of(one.product), dtype=one.dtype) for one in candidates]

        def own():
            for one, x in zip(candidates, given):
                one.own(x)

        def mine():
            for one, x in zip(candidates, given):
                one.product.run(x, *one.product.tensors, None)

        return nullcontext((own, mine))

    kinds = "; ".join(one.product.kind for one in candidates)
    return faster.choice_of(f"linear layers ({kinds})", both, _TIMED)


def names_of(tensors: tuple[Tensor | None, ...]) -> tuple[str, ...]:
    """The buffers of a module that have a product's tensors."""
    return tuple(f"fftune_{place}" for place in range(len(tensors)))


def register(module: nn.Module, tensors: tuple[Tensor | None, ...]) -> None:
    for name, tensor in zip(names_of(tensors), tensors):
        module.register_buffer(name, tensor, persistent=False)


def leave(module: nn.Module, product: Product) -> None:
    """Takes the tensors of a product from a module that stays vLLM's."""
    for name in names_of(product.tensors):
        module._buffers.pop(name, None)
    _adopted[module.__dict__.setdefault("_fftune_number", len(_adopted))] = ""


# weights that are loaded again

_TAKE = "_fftune_take"  # the attribute of a layer that was loaded


def keep(layer: nn.Module, take: Callable | None) -> None:
    """Notes that a layer was loaded: `take` gives the tensors that run here new numbers; None if it stayed vLLM's."""
    layer.__dict__[_TAKE] = take


def taking_of(layer: nn.Module) -> Callable | None:
    """The `take` of a layer."""
    return layer.__dict__.get(_TAKE)


def is_loaded(layer: nn.Module) -> bool:
    return _TAKE in layer.__dict__


def load_again(layer: nn.Module, process: Callable[[], None], read: Callable[[], tuple], reads_first: bool = True) -> bool:
    """Loads the weights of a layer once more, as vLLM does between the steps of a training. Graphs and compiled code read
    the tensors of the first time: the numbers that read() gives go there, and a layer that stayed vLLM's stays so. Whether
    it runs here."""
    take = layer.__dict__[_TAKE]
    if take is None:
        process()
        return False
    found = read() if reads_first else None
    process()
    try:
        take(*(found if reads_first else read()))
    except Unfit as error:
        raise RuntimeError(f"fftune: {error}. Start the engine anew, or with FFTUNE_VLLM=0") from error
    return True


def take_over(mine: tuple[Tensor | None, ...], new: tuple[Tensor | None, ...]) -> None:
    """Copies tensors to where others are."""
    def kind(tensor: Tensor | None):
        return tensor is not None and (tensor.shape, tensor.dtype)

    if list(map(kind, mine)) != list(map(kind, new)):
        raise Unfit("the weights that are loaded again have another format than those that run")
    with torch.inference_mode():  # weights of networks were packed in a step, which is in this mode
        for old, own in zip(mine, new):
            if old is not None:
                old.copy_(own)


def adopt(kernel, apply: Callable, layer: nn.Module, product: Product, dtype: torch.dtype, decided: Callable[[str], None]
          ) -> None:
    """Makes `product` the kernel's apply_weights where it computes what `apply(kernel, layer, x, bias)` does, and faster.
    `decided(reason)` is called once that is known, maybe when other layers are loaded: with the reason why not, or "".
    Until then vLLM's kernel runs the layer."""
    def own(x: Tensor) -> Tensor:
        return apply(kernel, layer, x, None)

    def end(reason: str) -> None:
        if reason:
            leave(layer, product)
        else:
            kernel.apply_weights = apply_weights
        decided(reason)

    kind, n, names = product.kind, product.n, names_of(product.tensors)

    def apply_weights(layer: nn.Module, x: Tensor, bias: Tensor | None = None, **_) -> Tensor:
        return torch.ops.fftune_vllm.run(x, [getattr(layer, name) for name in names], bias, kind, n)

    try:
        serve(layer, product, own, dtype, plans.most_rows())
        _compete(_Candidate(product, own, dtype, end))
    except Exception as error:
        end(reason_of(error))


def _expect_keyed() -> None:
    """Has vLLM's key of compiled code tell which layers run by the op: vLLM loads such code without tracing again, so
    an engine with the plugin and one without it would run each other's."""
    from vllm import envs

    original = getattr(envs, "compile_factors", None)
    if original is None:
        raise Unfit("vLLM's key of compiled code is not known")
    if hasattr(original, "_fftune_original"):
        return

    def compile_factors() -> dict[str, object]:
        decide()
        return {**original(), "fftune": hashlib.sha256(repr(_adopted).encode()).hexdigest()}

    compile_factors._fftune_original = original
    envs.compile_factors = compile_factors


def log_layer(name: str, reason: str, by: str) -> None:
    log_once(f"linear layers by {name} stay vLLM's: {reason}" if reason else
             f"linear layers by {name} run by linear, {by}")


def free(layer: nn.Module, names) -> None:
    """Gives back the memory of parameters that nothing reads any more."""
    for name in names:
        tensor = getattr(layer, name or "", None)
        if isinstance(tensor, Tensor):
            tensor.data = tensor.data.new_empty(0)
