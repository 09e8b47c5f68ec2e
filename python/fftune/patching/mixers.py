"""Layers of linear attention: their causal convolutions by causal_conv1d, their cores by gated_delta_rule and ssd.

These layers call functions of their modeling file by name. The forward of an instance becomes the class's own with
other functions under these names: whatever a layer does around them, with caches, masks and packed sequences, stays
as it is. A function is replaced if it computes what ours does; ours calls it for all that the kernels do not serve.
"""
import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops, reference
from .._custom import wants_gradient
from .recognise import (Foreign, Numbers, Options, Unfit, are_plain, expect_plain_parameters, has_kernels, identify,
                        is_close, original, remembered, trying, undoable)
from .trial import hidden, replace_forward

_ACTS = {None: "none", "silu": "silu", "swish": "silu"}


def _serves(x: Tensor, weight: Tensor, bias: Tensor | None, activation) -> bool:
    return (isinstance(activation, (str, type(None))) and activation in _ACTS and x.dim() == 3
            and weight.dim() == 2 and 2 <= weight.shape[-1] <= 8 and has_kernels(x)
            and not torch.is_autocast_enabled(x.device.type)
            and weight.dtype in (x.dtype, torch.float32) and (bias is None or bias.dtype == weight.dtype)
            and are_plain(x, weight, bias))


def _offsets(batch: int, tokens: int, options: dict) -> Tensor | None:
    """Where packed sequences begin among the tokens of all rows of a batch."""
    indices = options.get("seq_idx")
    if indices is None:
        return None
    ends = options.get("cu_seq_lens_q")
    if ends is not None and batch == 1 and tokens == indices.shape[-1]:
        return ends.int()
    first = torch.ones_like(indices, dtype=torch.bool)
    first[:, 1:] = indices[:, 1:] != indices[:, :-1]
    begins = first.flatten().nonzero().flatten()
    return torch.cat((begins, begins.new_tensor([indices.numel()]))).int()


def _are_apart(batch: int, tokens: int, options: dict) -> bool:
    """Whether _offsets() tells sequences of all tokens apart, or none are packed."""
    indices = options.get("seq_idx")
    return indices is None or indices.shape == (batch, tokens)


def _convolve(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **options):
        others = ("initial_states", "return_final_states", "final_states_out")
        if (not _serves(hidden_states, weight, bias, activation)
                or not _are_apart(hidden_states.shape[0], hidden_states.shape[2], options)
                or any(options.get(name) not in (None, False) for name in others)):
            return theirs(hidden_states, weight, bias, activation=activation, **options)
        x = hidden_states.transpose(1, 2)
        offsets = _offsets(*x.shape[:2], options)
        if offsets is None:
            y = ops.causal_conv1d(x, weight, bias, act=_ACTS[activation])
        else:
            y = ops.causal_conv1d(x.reshape(-1, x.shape[-1]), weight, bias, act=_ACTS[activation], offsets=offsets)
        return y.view(x.shape).transpose(1, 2)
    return causal_conv1d_fn


def _advance(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def causal_conv1d_update(hidden_states, conv_state, weight, bias=None, activation=None, **options):
        tensors = (hidden_states, conv_state, weight, bias)
        if (not _serves(hidden_states, weight, bias, activation) or conv_state.dtype != hidden_states.dtype
                or conv_state.shape[-1] < weight.shape[-1] - 1 or any(v is not None for v in options.values())
                or not are_plain(conv_state)
                or wants_gradient(*tensors)):
            return theirs(hidden_states, conv_state, weight, bias, activation, **options)
        return ops.causal_conv1d_update(hidden_states.transpose(1, 2), weight, bias, state=conv_state,
                                        act=_ACTS[activation], state_order="channels").transpose(1, 2)
    return causal_conv1d_update


def _draw(numbers: Numbers, state: bool) -> tuple:
    """Six channels, 2 to 5 taps, and 1 to 7 tokens; two of three draws have a bias."""
    width, tokens = 2 + numbers.seed % 4, 1 + numbers.seed * 3 % 7
    x = numbers(2, 6, 1 if state else tokens) * (1.0, 4.0)[numbers.seed % 2]
    weight, bias = numbers(6, width), numbers(6) if numbers.seed % 3 else None
    return (x, numbers(2, 6, width), weight, bias) if state else (x, weight, bias)


def _expect_convolution(theirs: Callable) -> bool:
    def ours(act, flips=False, shifts=0):
        def compute(given):
            x, weight, bias = given
            y = reference.causal_conv1d(x.transpose(1, 2).roll(-shifts, 1), weight.flip(-1) if flips else weight,
                                        bias, None, act)
            return y.transpose(1, 2)
        return compute

    for activation, act in _ACTS.items():
        known = {act: ours(act), Foreign("a convolution with the last tap first"): ours(act, flips=True),
                 Foreign("a convolution of the next token"): ours(act, shifts=1),
                 Foreign("another activation"): ours("none" if act == "silu" else "silu")}
        identify(lambda given: theirs(*given, activation=activation), known, lambda n: _draw(n, False),
                 subject="causal_conv1d_fn", least=12, sizes=False)
    return True


def _expect_update(theirs: Callable) -> bool:
    def run(function):
        def compute(given):
            x, state, weight, bias = given
            state = state.clone()
            return function(x, state, weight, bias), state
        return compute

    def ours(act, order="channels"):
        return run(lambda x, state, weight, bias: reference.causal_conv1d_update(
            x.transpose(1, 2), weight, bias, None, None, None, None, state, act, order, 0).transpose(1, 2))

    def agrees(ours, right):
        return all(map(is_close, ours, right))

    for activation, act in _ACTS.items():
        known = {act: ours(act), Foreign("another activation"): ours("none" if act == "silu" else "silu"),
                 Foreign("a state that stays"): lambda given: (ours(act)(given)[0], given[1])}
        identify(run(lambda *given: theirs(*given, activation)), known, lambda n: _draw(n, True), agrees=agrees,
                 subject="causal_conv1d_update", least=12, sizes=False)
    return True


_MOST_FEATURES = 256


def _core(theirs: Callable) -> Callable:
    """The gated delta rule, with a decay of each head or of each feature, in chunks or token by token."""
    @functools.wraps(theirs)
    def gated_delta_rule(query, key, value, g, beta, *others, **options):
        initial, packed = options.get("initial_state"), options.get("cu_seqlens")
        keeps = bool(options.get("output_final_state"))
        # Indices of sequences tell how many states there are to the device alone.
        indexed = packed is None and options.get("seq_idx") is not None
        if (others or not has_kernels(query) or torch.is_autocast_enabled(query.device.type)
                or not query.dtype == key.dtype == value.dtype or max(key.shape[-1], value.shape[-1]) > _MOST_FEATURES
                or value.shape[2] % key.shape[2] or not 0 < query.numel()
                or initial is not None and initial.dtype not in (torch.float32, torch.bfloat16)
                or indexed and (keeps or initial is not None or not _are_apart(*query.shape[:2], options))
                or packed is not None and query.shape[0] != 1
                or not are_plain(query, key, value, g, beta, initial, packed)):
            return theirs(query, key, value, g, beta, *others, **options)
        offsets = _offsets(*query.shape[:2], options) if indexed else None if packed is None else packed.int()
        given = [t if offsets is None else t.flatten(0, 1) for t in (query, key, value, g.float(), beta.float())]
        found = ops.gated_delta_rule(
            *given, qk_norm=bool(options.get("use_qk_l2norm_in_kernel")), initial_state=initial, state_layout="kv",
            offsets=offsets, return_state=keeps)
        out, state = found if keeps else (found, None)
        return out.view(value.shape), state
    return gated_delta_rule


def _expect_core(theirs: Callable) -> bool:
    def draw(numbers: Numbers, of_features: bool) -> tuple:
        tokens, heads, values = (1, 3, 70)[numbers.seed % 3], 2, 2 if of_features else 4
        shape = (2, tokens, values, 8) if of_features else (2, tokens, values)
        return (numbers(2, tokens, heads, 8), numbers(2, tokens, heads, 8), numbers(2, tokens, values, 6),
                -numbers(*shape).exp(), numbers(2, tokens, values).sigmoid(), numbers(2, values, 8, 6),
                numbers.seed % 2 == 1)

    def ours(scale=0.0, decays=True, reads_before=False, decay="head"):
        def compute(given):
            q, k, v, g, beta, state, norm = given
            return reference.gated_delta_rule_kv(
                q, k, v, g if decays else g * 0, None, None, None, beta, None, state if not reads_before else -state,
                None, None, "log", decay, "l2" if norm else "none", scale, 1.0, -5.0, "f32", True)
        return compute

    def compute(given):
        *tensors, state, norm = given
        return theirs(*tensors, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=norm)

    def agrees(ours, right):
        return all(is_close(own, other, 2e-5) for own, other in zip(ours, right))

    reason = None
    for decay in ("head", "channel"):
        known = {decay: ours(decay=decay), Foreign("a rule with another scale"): ours(scale=1.0, decay=decay),
                 Foreign("a rule without decay"): ours(decays=False, decay=decay),
                 Foreign("a rule with another state"): ours(reads_before=True, decay=decay)}
        try:
            identify(compute, known, lambda n: draw(n, decay == "channel"), agrees=agrees, least=12, sizes=False,
                     free=("linalg_solve_triangular",),  # a rational function
                     subject="the gated delta rule")
            return True
        except Unfit as unfit:
            reason = reason or unfit
    raise reason


_NO_LIMIT = (0.0, float("inf"))


def _is_fast(x: Tensor, b: Tensor) -> bool:
    """Whether wgmma's kernel serves prompts on this GPU, or x is one token of each sequence. The other kernels take
    longer than Triton's; few heads, which have a CTA each, and backward passes have not been timed beside it
    (docs/measurements/linear-and-latent.md)."""
    is_step = x.dim() == 3
    return (torch.cuda.get_device_capability(x.device) == (9, 0) and x.dtype == torch.bfloat16
            and x.shape[-1] % 16 == b.shape[-1] % 64 == 0 and (is_step or x.shape[0] * x.shape[2] >= 64))


def _has_ssd(x: Tensor, dt: Tensor, *others: Tensor | None) -> bool:
    """Whether the op computes in the types of x, dt, B and C, the first two of the others."""
    return (has_kernels(x) and (not x.is_cuda or _is_fast(x, others[0]) and not wants_gradient(x, dt, *others))
            and not torch.is_autocast_enabled(x.device.type) and x.numel() > 0
            and all(t.dtype == x.dtype for t in (dt, *others[:2])) and x.shape[-2] % others[0].shape[-2] == 0
            and max(x.shape[-1], others[0].shape[-1]) <= _MOST_FEATURES and are_plain(x, dt, *others))


def _scan(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def mamba2_chunk_scan(hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None,
                          dt_softplus=False, dt_limit=_NO_LIMIT, return_final_states=False, **options):
        packed = options.get("seq_idx") is not None
        if (options.get("z") is not None or packed and (return_final_states or initial_states is not None)
                or not _are_apart(*hidden_states.shape[:2], options)
                or not _has_ssd(hidden_states, dt, B, C, A, D, dt_bias, initial_states)
                or not 0 <= dt_limit[0] <= dt_limit[1] or dt_limit[1] == 0
                or initial_states is not None and initial_states.dtype not in (torch.float32, torch.bfloat16)
                or D is not None and D.dim() != 1):
            return theirs(hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
                          dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states,
                          **options)
        x, offsets = hidden_states, _offsets(*hidden_states.shape[:2], options)
        if offsets is not None:
            x, dt, B, C = (t.flatten(0, 1) for t in (x, dt, B, C))
        found = ops.ssd(x, dt, A, B, C, D, dt_bias=dt_bias, softplus=bool(dt_softplus), dt_limit=tuple(dt_limit),
                        initial_state=initial_states, offsets=offsets, return_state=bool(return_final_states))
        return found if return_final_states else found.view(hidden_states.shape)
    return mamba2_chunk_scan


def _split(theirs: Callable) -> Callable:
    """The fused form of all of a layer in training, which transformers has of a package alone. Without that it gives
    None, and the layer goes on by the functions above; but of packed sequences it raises instead."""
    @functools.wraps(theirs)
    def mamba2_split_conv1d_scan_combined(zxbcdt, *arguments, **options):
        if not zxbcdt.is_cuda and options.get("seq_idx") is not None:
            return None
        return theirs(zxbcdt, *arguments, **options)
    return mamba2_split_conv1d_scan_combined


def _expect_split(theirs: Callable) -> bool:
    """That there is no package, whose function would take these arguments for tensors."""
    with trying("mamba2_split_conv1d_scan_combined is a package's"):
        found = theirs(*[None] * 7)
    if found is not None:
        raise Unfit("mamba2_split_conv1d_scan_combined computes something")
    return True


def _first(t: Tensor | None, dims: int) -> Tensor | None:
    """A tensor that was expanded along its last dims, without them; None if they hold more than one number."""
    if t is None or any(size > 1 and stride for size, stride in zip(t.shape[-dims:], t.stride()[-dims:])):
        return None
    return t[(..., *(0,) * dims)]


def _select(theirs: Callable) -> Callable:
    @functools.wraps(theirs)
    def mamba2_selective_state_update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False,
                                      z=None, **options):
        tensors = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
        x, step, rate = hidden_states, _first(dt, 1), _first(A, 2)
        skip, bias = _first(D, 1), _first(dt_bias, 1)
        if (x.dim() != 3 or step is None or rate is None or (skip is None) != (D is None)
                or (bias is None) != (dt_bias is None) or not _has_ssd(x, dt, B, C, A, D, dt_bias, state, z)
                or state.dtype not in (torch.float32, torch.bfloat16) or not state.is_contiguous()
                or wants_gradient(*tensors)):
            return theirs(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z=z, **options)
        indices = torch.arange(len(x), dtype=torch.int32, device=x.device)
        out = ops.ssd(x[:, None], step[:, None], rate, B[:, None], C[:, None], skip, dt_bias=bias,
                      softplus=bool(dt_softplus), states=state, state_indices=indices, null_index=-1)[:, 0]
        return out if z is None else out * nn.functional.silu(z)
    return mamba2_selective_state_update


def _draw_ssd(numbers: Numbers, tokens: int) -> tuple:
    """x, dt, A, B, C, D, dt_bias and a state; every fourth draw has no D, and every third no bias."""
    heads, groups = 4, 1 + numbers.seed % 2
    return (numbers(2, tokens, heads, 6), numbers(2, tokens, heads), -numbers(heads).exp(),
            numbers(2, tokens, groups, 8), numbers(2, tokens, groups, 8), numbers(heads) if numbers.seed % 4 else None,
            numbers(heads) if numbers.seed % 3 else None, numbers(2, heads, 6, 8))


def _expect_ssd(run: Callable, draw: Callable, subject: str) -> bool:
    """That run(input) is (out, state) of the recurrence, of an input that ends with the limits of dt."""
    def ours(decays=True, skips=True, softplus=True, begins=True):
        def compute(given):
            x, dt, A, B, C, D, dt_bias, state, limits = given
            return reference.ssd(x, dt, A if decays else A * 0, None, B, C, D if skips else None, dt_bias,
                                 state if begins else -state, None, None, softplus, limits[0],
                                 0.0 if limits == _NO_LIMIT else limits[1], "f32", True)
        return compute

    known = {"ssd": ours(), Foreign("a scan without decay"): ours(decays=False),
             Foreign("a scan without D"): ours(skips=False), Foreign("a scan with other steps"): ours(softplus=False),
             Foreign("a scan with another state"): ours(begins=False)}
    return bool(identify(run, known, draw, least=12, sizes=False, subject=subject,
                         agrees=lambda ours, right: all(is_close(a, b, 2e-5) for a, b in zip(ours, right))))


def _expect_scan(theirs: Callable) -> bool:
    def draw(numbers: Numbers) -> tuple:
        limits = _NO_LIMIT if numbers.seed % 2 else (0.25, 1.5)
        return *_draw_ssd(numbers, (1, 3, 21)[numbers.seed % 3]), limits

    def run(given):
        x, dt, A, B, C, D, dt_bias, state, limits = given
        return theirs(x, dt, A, B, C, chunk_size=8, D=D, dt_bias=dt_bias, initial_states=state, dt_softplus=True,
                      dt_limit=limits, return_final_states=True)
    return _expect_ssd(run, draw, "mamba2_chunk_scan")


def _expect_select(theirs: Callable) -> bool:
    def run(given):
        x, dt, A, B, C, D, dt_bias, state, _ = given
        heads, features, wide = state.shape[1:]
        D, dt_bias = (None if t is None else t[:, None].expand(-1, features) for t in (D, dt_bias))
        state = state.clone()
        out = theirs(state, x[:, 0], dt.transpose(1, 2).expand(-1, -1, features),
                     A[:, None, None].expand(-1, features, wide), B[:, 0], C[:, 0], D, dt_bias=dt_bias,
                     dt_softplus=True, z=None)
        return out[:, None], state
    return _expect_ssd(run, lambda numbers: (*_draw_ssd(numbers, 1), _NO_LIMIT), "mamba2_selective_state_update")


# By the name that a modeling file has for a function: what must hold for it, ours, and the op that it is if any.
_FUNCTIONS = {"causal_conv1d_fn": (_expect_convolution, _convolve, "causal_conv1d"),
              "causal_conv1d_update": (_expect_update, _advance, "causal_conv1d"),
              "mamba2_chunk_scan": (_expect_scan, _scan, "ssd"),
              "mamba2_split_conv1d_scan_combined": (_expect_split, _split, None),
              "mamba2_selective_state_update": (_expect_select, _select, "ssd"),
              **dict.fromkeys(("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
                               "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
                              (_expect_core, _core, "gated_delta_rule"))}


def _of_class(kind: type) -> tuple[types.FunctionType, dict[str, Callable]] | None:
    """The forward of a class without decorators, and those of the functions that it calls by name."""
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, types.FunctionType):
        return None
    found = {name: forward.__globals__[name] for name in forward.__code__.co_names
             if name in _FUNCTIONS and callable(forward.__globals__.get(name))}
    return (forward, found) if found else None


@functools.cache
def _forward_of(kind: type, names: tuple[str, ...]) -> types.FunctionType:
    """The forward of a class with our functions under these names."""
    forward, found = _of_class(kind)
    function = types.FunctionType(
        forward.__code__, {**forward.__globals__, **{name: _FUNCTIONS[name][1](found[name]) for name in names}},
        forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def patch_mixer(module: nn.Module, known: dict, options: Options) -> str | None:
    convolutions = [m for m in module._modules.values() if isinstance(m, nn.Conv1d)]
    found = _of_class(type(module)) if convolutions else None
    if found is None:
        return None
    expect_plain_parameters(module)
    names, reason, gpu = [], None, [p.device for p in module.parameters() if p.is_cuda]
    for name, function in found[1].items():
        try:
            if _FUNCTIONS[name][2] == "ssd" and gpu and torch.cuda.get_device_capability(gpu[0]) != (9, 0):
                raise Unfit(f"{name} stays the model's on this GPU: ssd is slower in prompts than Triton's kernels")
            remembered(known, (name, function), lambda: _FUNCTIONS[name][0](function))
            names.append(name)
        except Unfit as unfit:
            reason = unfit
    ops_of_it = list(filter(None, dict.fromkeys(_FUNCTIONS[name][2] for name in names)))
    if not ops_of_it:
        raise reason or Unfit(f"{type(module).__name__} calls no function that an op computes")
    width = getattr(module, "hidden_size", None)
    if not isinstance(width, int):
        width = next((m.in_features for m in module._modules.values() if isinstance(m, nn.Linear)), None)
    if width is None:
        raise Unfit(f"{type(module).__name__} has no projection whose input could be tried")
    replace_forward(module, mixer_forward, (tuple(names),), hidden(width), known)
    return f"functions of {type(module).__name__} by {' and '.join(ops_of_it)}"


@undoable
def mixer_forward(self, *arguments, **options):
    # A compiler cannot look into a forward with functions of its own; and accelerate's hooks move weights that
    # are used without a call of their module.
    if torch.compiler.is_compiling() or any("_hf_hook" in m.__dict__ for m in self._modules.values() if m is not None):
        return original(self, *arguments, **options)
    names, = self._fftune
    forward = _forward_of(type(self), names)
    if options.get("cu_seq_lens_q") is not None and options.get("seq_idx") is None \
            and "cu_seq_lens_q" in forward.__code__.co_consts:
        # The core keeps sequences apart by their ends, and the convolution by indices alone: it would mix them.
        x = arguments[0] if arguments else options["hidden_states"]
        places = torch.arange(x.shape[1], device=x.device)
        options["seq_idx"] = torch.searchsorted(options["cu_seq_lens_q"][1:].long(), places, right=True).int()[None]
    return forward(self, *arguments, **options)
