"""Rotary embeddings by rope, and the projections of attention around them by linear and qkv."""
import functools
import inspect
import types
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .. import ops, reference
from .._versions import as_option, in_forward_mode, is_known, is_transformed, name_of_cache, take_cache, updated
from . import attention as attentions
from .analytic import PATCHED
from .norms import norm_forward, settings_of
from .fp8_linear import fp8_linear, is_rounded_fp8, merge_fp8, merged_fp8_of, serves
from .quantised import (fits, is_quantised, merge, merged_of, numbers_of, ordered,
                        quantised_linear)
from .recognise import (Elsewhere, Foreign, Numbers, are_plain, Options, PatchReport, Unfit, drops, expect_alike,
                        expect_no_hooks, expect_plain, has_fast_products, has_kernels, identify, is_close,
                        is_patched, kind_of, original, remembered, set_forward, stand_in, take_back, try_to, trying, undoable,
                        watched)
from .trial import Trial, expect_to_run, replace_forward, shadow, tokens_of


_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


def patch_rotary(model: nn.Module, report: PatchReport, options: Options) -> None:
    """The rotary module gives angles in the place of cosines and sines, and the attentions' own
    apply_rotary_pos_emb takes them: so all of them are replaced, or none."""
    rotaries = [(name, m) for name, m in model.named_modules()
                if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")]
    if not rotaries:
        return
    name, rotary = rotaries[0]
    try:
        if len(rotaries) > 1:
            raise Unfit("several rotary embeddings, each for some layers")
        if getattr(rotary, "rope_type", None) not in _STATIC_ROPES:
            raise Unfit(f"its frequencies change with the length: {rotary.rope_type}")
        if "forward" in rotary.__dict__:
            raise Unfit("its forward was replaced already")
        attentions = [(n, m) for n, m in model.named_modules() if _applies_rotary(m)]
        users = [n for n, m in model.named_modules()
                 if "position_embeddings" in inspect.signature(type(m).forward).parameters
                 and all(m is not other for _, other in attentions)
                 and (_rotates_itself(m) or not any(
                     child is other for child in m.modules() for _, other in attentions))]
        if not attentions or users:
            raise Unfit(f"{users[0] if users else 'nothing'} uses it in a way that is not known")
        if _has_axes(stand_in(rotary)):
            raise Unfit("it takes positions of several axes")
        layout = layout_of(rotary)
        for _, module in attentions:
            if "forward" in module.__dict__:
                raise Unfit(f"the forward of {type(module).__name__} was replaced already")
        functions = {kind: _attention_function(kind, rotary, layout) for kind in {type(m) for _, m in attentions}}
        rotations = {rotation for _, rotation, _ in functions.values()}
        if len(rotations) > 1:
            raise Unfit("its users rotate in several ways")
        rotation, = rotations
        scale, known = float(rotary.attention_scaling), {}
        replace_forward(rotary, rotary_forward, (rotation, scale), _trial_of_rotary(), known)
        try:
            for _, module in attentions:
                forward, _, theirs = functions[type(module)]
                replace_forward(module, forward, (scale, False, rotation, theirs, ""), _trial_of(module, rotary), known)
        except Unfit:
            for module in (rotary, *(m for _, m in attentions)):
                take_back(module)
            raise
        report.replaced.append((name, f"{type(rotary).__name__} by rope"))
        if options.projections:
            for other, module in attentions:
                try_to(report, other, lambda: patch_projections(model, module, rotary, options, known))
    except Unfit as reason:
        report.left.append((name, str(reason)))


def _applies_rotary(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "apply_rotary_pos_emb" in code.co_names


def _rotates_itself(module: nn.Module) -> bool:
    """Whether its forward takes cosines and sines apart, or rotates in another way."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is None or bool({"cos", "sin"} & {*code.co_varnames, *code.co_names}) or any(
        name.startswith("apply_rotary") for name in code.co_names)


def angles_of(pairs: Tensor, rotation: str) -> Tensor:
    """The columns that the ops take, from one angle for each pair of features."""
    if rotation == "interleaved":
        return pairs.repeat_interleave(2, -1)
    return torch.cat((pairs, pairs), -1)


# How rotary embeddings give the cosines, or sines, of one angle for each pair.
_LAYOUTS = {"halves": lambda pairs: torch.cat((pairs, pairs), -1),
            "interleaved": lambda pairs: pairs.repeat_interleave(2, -1), "once": lambda pairs: pairs}
_HEAD = 16  # features of the heads that are tried


def _rotation_of(theirs, layout: str, width: int) -> str:
    """The rotation that apply_rotary_pos_emb computes, with cosines and sines of `width` features."""
    def swap(t):
        return t.transpose(1, 2)

    def draw(numbers: Numbers) -> tuple:
        return (numbers(2, 3, 5, _HEAD), numbers(2, 1, 5, _HEAD),
                numbers(1, 5, width // 2) * (3.0 if numbers.seed % 2 else 0.3))

    def given_cosines(given):
        q, k, pairs = given
        angles = _LAYOUTS[layout](pairs)
        return theirs(q, k, angles.cos(), angles.sin())

    def rotated(rotation: str, sign: float):
        def compute(given):
            q, k, pairs = given
            return tuple(map(swap, reference.rope_qk(
                swap(q), swap(k), angles_of(pairs[0] * sign, rotation), None, None, rotation, width,
                "table", [1.0] * 8)))
        return compute

    known = {rotation: rotated(rotation, 1.0) for rotation in ("halves", "interleaved")}
    known |= {Foreign(f"a rotation by {name} the other way"): rotated(name, -1.0) for name in known}
    return identify(given_cosines, known, draw, subject="its apply_rotary_pos_emb",
                    agrees=lambda ours, right: len(ours) == len(right)
                    and all(map(is_close, ours, right)))


def _takes_less(theirs, layout: str) -> bool:
    """Whether it rotates a part of the features of a head."""
    q, pairs = Numbers(0)(1, 1, 5, _HEAD), Numbers(1)(1, 5, _HEAD // 4)
    angles = _LAYOUTS[layout](pairs)
    try:
        return theirs(q, q, angles.cos(), angles.sin())[0].shape == q.shape
    except Exception:  # it is given no more than it rotates
        return False


def _is_wrapped_by_packages(function) -> bool:
    """Whether all decorators of a function, which then only change how it is called, are PyTorch's and
    transformers'."""
    while hasattr(function, "__wrapped__"):
        if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] not in ("torch", "transformers"):
            return False
        function = function.__wrapped__
    return True


def _attention_function(kind: type, rotary: nn.Module, layout: str):
    """The class's forward, with another apply_rotary_pos_emb among its globals; and the rotation."""
    if not _is_wrapped_by_packages(kind.forward):
        raise Unfit(f"a decorator is around the forward of {kind.__name__}, which would not be called")
    forward = inspect.unwrap(kind.forward)
    others = [name for name in forward.__code__.co_names
              if name.startswith("apply_rotary") and name != "apply_rotary_pos_emb"]
    if others:
        raise Unfit(f"{kind.__name__} rotates by {others[0]} too, which is not known")
    if any("unsqueeze_dim" in words for words in forward.__code__.co_consts
           if isinstance(words, tuple)):
        raise Unfit(f"{kind.__name__} rotates heads that lie in another order")
    theirs = forward.__globals__["apply_rotary_pos_emb"]
    widths = (_HEAD, _HEAD // 2) if _takes_less(theirs, layout) else (_HEAD,)
    rotations = {_rotation_of(theirs, layout, width) for width in widths}
    if len(rotations) != 1:
        raise Unfit("its apply_rotary_pos_emb rotates heads of another size in another way")
    rotation, = rotations
    scale = float(rotary.attention_scaling)

    def apply_rotary_pos_emb(q, k, cos, sin, *arguments, **options):
        rope = rope_of((cos, sin))
        if rope is None or (rope.rotation, rope.scale) != (rotation, scale) or not has_kernels(q) \
                or q.dtype != cos.dtype and not torch.is_autocast_enabled(q.device.type):
            return theirs(q, k, cos, sin, *arguments, **options)
        return rotate(q, k, rope)

    # Without a name of the module torch.compile looks globals up here, not in the module.
    scope = {name: value for name, value in forward.__globals__.items() if name != "__name__"}
    scope["apply_rotary_pos_emb"] = apply_rotary_pos_emb
    function = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__,
                                  forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return undoable(function), rotation, theirs


def frequencies(rotary: nn.Module, kind: str | None = None) -> Tensor:
    """Those of all layers, or of layers of a kind."""
    return getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq")


def scaling(rotary: nn.Module, kind: str | None = None) -> float:
    """The factor of cosines and sines."""
    return float(getattr(rotary, "attention_scaling" if kind is None else f"{kind}_attention_scaling", 1.0))


def layout_of(rotary: nn.Module, kind: str | None = None) -> str:
    """How it gives the cosines and sines of positions times its frequencies."""
    own, kinds = stand_in(rotary), () if kind is None else (kind,)

    def draw(numbers: Numbers) -> Tensor:
        return torch.randint(0, 4096, (1, 7), generator=numbers.generator)

    def computed(layout):
        def compute(position_ids):
            angles, scale = layout(_pairs(own, position_ids, kind)), scaling(own, kind)
            return torch.cat((angles.cos() * scale, angles.sin() * scale))
        return compute

    return identify(lambda position_ids: torch.cat(own(torch.zeros(1), position_ids, *kinds)),
                    {name: computed(layout) for name, layout in _LAYOUTS.items()}, draw,
                    subject=type(rotary).__name__,
                    # One pair has no order.
                    canonical=lambda name: name if name == "once" or frequencies(rotary, kind).numel() > 1
                    else "", elsewhere=Elsewhere(own, types=()))


def is_complex_rotary(rotary: nn.Module, kind: str | None = None) -> bool:
    """Whether it gives the complex numbers of positions times its frequencies, cosines and sines of each pair."""
    own, kinds = stand_in(rotary), () if kind is None else (kind,)
    with torch.no_grad():
        given = own(torch.zeros(1), torch.arange(3)[None], *kinds)
    if not isinstance(given, Tensor) or not given.is_complex():
        return False

    def draw(numbers: Numbers) -> Tensor:
        return torch.randint(0, 4096, (1, 7), generator=numbers.generator)

    def computed(sign: float):
        def compute(position_ids):
            angles = sign * _pairs(own, position_ids, kind)
            return torch.view_as_real(torch.polar(torch.ones_like(angles), angles) * scaling(own, kind))
        return compute

    return identify(lambda position_ids: torch.view_as_real(own(torch.zeros(1), position_ids, *kinds)),
                    {True: computed(1.0), Foreign("a rotation the other way"): computed(-1.0)}, draw,
                    subject=type(rotary).__name__, elsewhere=Elsewhere(own, types=()))


def _has_axes(rotary: nn.Module) -> bool:
    """Whether it takes features of a token from positions [axes, rows, tokens], those of pictures and
    films say. Others keep the axes."""
    try:
        with torch.no_grad():
            return rotary(torch.zeros(1), torch.arange(21).view(3, 1, 7))[0].dim() == 3
    except Exception:
        return False


def _pairs(rotary: nn.Module, position_ids: Tensor, kind: str | None = None) -> Tensor:
    """One angle for each pair of features."""
    return position_ids[..., None].float() * frequencies(rotary, kind).to(position_ids.device, torch.float)


class Rope:
    """The angles of cosines and sines, which carry them to readers that rotate by the ops. All others have the
    cosines and sines as the model makes them."""

    def __init__(self, rotation: str, scale: float, sin: Tensor, make):
        self.rotation, self.scale, self.sin, self._make = rotation, scale, sin, make

    @functools.cached_property
    def _made(self) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self._make()

    @property
    def angles(self) -> Tensor:
        """float32 [1 or batch, tokens, features]"""
        return self._made[0]

    @property
    def rows(self) -> Tensor:
        """Each token's row of the angles, int32 [batch, tokens]."""
        return self._made[1]

    def __reduce__(self):
        return type(None), ()  # copies are cosines alone


def carry(cos: Tensor, rope: Rope) -> None:
    """Gives cosines the angles that they are of."""
    rope.versions = _versions((cos, rope.sin))
    cos._fftune_rope = rope


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    """How often each was written to, which those of inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in tensors]


def rope_of(embeddings) -> Rope | None:
    """The angles of cosines and sines that a replaced rotary embedding gave, if they are as it gave them. A compiler
    fuses the rotation with what is around it, and cannot look into an op."""
    if torch.compiler.is_compiling() or not isinstance(embeddings, (tuple, list)) or len(embeddings) != 2:
        return None
    cos, sin = embeddings
    rope = getattr(cos, "_fftune_rope", None)
    return rope if rope is not None and rope.sin is sin and rope.versions == _versions((cos, sin)) else None


@undoable
def rotary_forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return original(self, x, position_ids)
    # Tensors of inference mode do not count what is written to them.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        embeddings = original(self, x, position_ids)
    rotation, scale = self._fftune
    if position_ids.dim() != 2 or self.attention_scaling != scale or in_forward_mode() or is_transformed(embeddings[0]):
        return embeddings
    batch = x.shape[0]

    def angles() -> tuple[Tensor, Tensor]:
        own = angles_of(_pairs(self, position_ids), rotation)
        rows = torch.arange(own.shape[0] * own.shape[1], dtype=torch.int32, device=own.device)
        return own, rows.view(own.shape[:-1]).expand(batch, -1).contiguous()

    cos, sin = embeddings
    carry(cos, Rope(rotation, scale, sin, angles))
    return embeddings


def rotation_of(rotary: nn.Module) -> str | None:
    """The rotation whose angles its cosines and sines carry; None where it is not replaced."""
    return rotary.__dict__["_fftune"][0] if is_patched(rotary, rotary_forward) else None


def _trial_of_rotary() -> Trial:
    return Trial(lambda numbers, like: (numbers(2, 3, 4), torch.arange(3).expand(2, -1)))


def _trial_of(attention: nn.Module, rotary: nn.Module) -> Trial:
    """Cosines and sines are those of the rotary embedding that was replaced."""
    width = next((getattr(child, "in_features", None) for child in attention.modules()
                  if getattr(child, "in_features", None)), None)
    if width is None:
        raise Unfit(f"{type(attention).__name__} has no linear layer")

    def given(numbers: Numbers, like: Tensor) -> dict:
        batch, tokens = tokens_of(width, like)
        x = numbers(batch, tokens, width, like=like)
        embeddings = shadow(rotary, {}, like.device).forward(x, torch.arange(7, 7 + tokens, device=like.device)[None])
        return dict(hidden_states=x, position_embeddings=embeddings, attention_mask=None)
    return Trial(given)


def rotate(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """q, k [batch, heads, tokens, features]."""
    angles, options = rope.angles, dict(scale=rope.scale, rotation=rope.rotation)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    batch, rotary = q.shape[0], angles.shape[-1]  # features behind those stay as they are
    if angles.shape[0] == 1:
        q, k = ops.rope(q, k, angles=angles[0], rotary=rotary, **options)
    else:  # every token has a position of its own: a sequence of them all
        flat = lambda t: t.flatten(0, 1).unsqueeze(0)
        q, k = ops.rope(flat(q), flat(k), angles=angles.flatten(0, 1), rotary=rotary, **options)
        q, k = (t.squeeze(0).unflatten(0, (batch, -1)) for t in (q, k))
    return q.transpose(1, 2), k.transpose(1, 2)


# projections of attention

_SETTINGS = 5  # of attention whose angles are rope's; that to chosen keys has others
_FEW_TOKENS = 64  # up to which linear's kernels for few tokens are taken by "auto"
_BESIDE = ("sdpa", *attentions.OURS)  # implementations of attention


def fuses_projections(forward):
    """Marks the forward of a layer that runs its attention by attend() where projects() says so."""
    forward._fuses_projections = True
    return forward


def _is_in_fused_layer(model: nn.Module, attention: nn.Module) -> bool:
    forwards = (layer.__dict__.get("forward") for layer in model.modules()
                if layer._modules.get("self_attn") is attention)
    return any(hasattr(getattr(forward, "_fftune_forward", None), "_fuses_projections")
               for forward in forwards)


def patch_projections(model: nn.Module, module: nn.Module, rotary: nn.Module, options: Options, known: dict
                      ) -> str | None:
    beside = getattr(getattr(module, "config", None), "_attn_implementation", "one of its own")
    if beside not in _BESIDE:
        raise Unfit(f"projections: they run beside the attention sdpa or {attentions.NAME}, not beside "
                    f"{beside}")
    if not _is_in_fused_layer(model, module):
        raise Unfit(f"projections: the norms around {type(module).__name__} are not fused")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer = getattr(module, name, None)
        if not _has_codes(layer):
            if type(layer) is not nn.Linear:
                raise Unfit(f"projections: {name} is no Linear")
            if hasattr(layer.__dict__.get("forward"), "_fftune"):
                raise Unfit(f"projections: {name} rounds its activations by compressed-tensors")
            expect_plain(layer)
        expect_no_hooks(layer)
    expect_no_hooks(module)
    layers = [module.q_proj, module.k_proj, module.v_proj]
    if all(map(_has_codes, layers)):
        try:
            (merge if is_quantised(layers[0]) else merge_fp8)(module, layers)
        except Unfit:
            pass  # three products
    scale, _, rotation, theirs, _ = module._fftune
    with trying(f"projections: {type(module).__name__} needs more than hidden states, rotary embeddings "
                "and a mask"):
        own = remembered(known, ("as patched", kind_of(module)), lambda: _stand_in_as_patched(module))
        own.layer_idx = _AnyLayer()
        try:
            remembered(known, ("attention", kind_of(module)), lambda: _expect_attention(module, own))
        except Unfit:  # which layers rotate may follow from their numbers
            own.layer_idx = getattr(module, "layer_idx", None)
            _expect_attention(module, own)
    settings = scale, options.projections, rotation, theirs, _rate_of(module)
    expect_to_run(module, _attention_forward, settings, _trial_of(module, rotary), known)
    module._fftune = settings
    return f"projections of {type(module).__name__} by linear" + (
        f" up to {_FEW_TOKENS} tokens" if options.projections == "auto" else "")


def _rate_of(attention: nn.Module) -> str:
    """The attribute with the rate of dropout that its forward reads; "" without any."""
    names = {name for name in inspect.unwrap(type(attention).forward).__code__.co_names
             if "dropout" in name and isinstance(getattr(attention, name, None), (int, float))}
    if len(names) > 1:
        raise Unfit(f"projections: {type(attention).__name__} has several rates of dropout")
    return next(iter(names), "")


def _stand_in_as_patched(module: nn.Module) -> nn.Module:
    """With the forwards that its parts have by now, and with weights."""
    own = stand_in(module)
    Numbers(0).fill(own)
    for one, other in zip(module.modules(), own.modules(), strict=True):
        if hasattr(one.__dict__.get("forward"), "_fftune") and not _has_codes(one):
            set_forward(other, one.__dict__["forward"].__func__, one._fftune)
    return own


def _has_codes(layer: nn.Module | None) -> bool:
    """Whether it is a replaced layer with codes, which rounds x or does not."""
    return is_quantised(layer) or is_rounded_fp8(layer)


def _linear(layer: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    if is_quantised(layer):
        return quantised_linear(layer, x, residual)
    if is_rounded_fp8(layer):
        if serves(layer, x):
            return fp8_linear(layer, x, residual)
        y = layer(x)
        return y if residual is None else y + residual
    return ops.linear(x, layer.weight, layer.bias, residual)


def _numbers_of(layer: nn.Module) -> Tensor:
    """A tensor of the type and device of its weight's numbers."""
    if is_rounded_fp8(layer):
        return layer.weight.new_empty(0, dtype=layer._fftune[0].dtype)
    return numbers_of(layer) if is_quantised(layer) else layer.weight


class _Kept:
    """A cache that has the last keys and values that it was given."""

    given: tuple[Tensor, ...] = ()

    def update(self, k: Tensor, v: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        self.given = k, v
        return k, v


class _AnyLayer:
    """In the place of a layer's number: what may go to a cache, and decides nothing."""

    def _used(self, *_):
        raise Unfit("the number of a layer decides")

    __eq__ = __ne__ = __hash__ = __bool__ = _used


def _expect_attention(module: nn.Module, own: nn.Module) -> bool:
    """That attend computes what it does, from the heads that _heads gives."""
    forward, rotated = module.forward.__func__, []
    rotate = forward.__globals__["apply_rotary_pos_emb"]

    def recorded(*arguments, **options):
        rotated.append(rotate(*arguments, **options))
        return rotated[-1]

    recording = types.FunctionType(
        forward.__code__, {**forward.__globals__, "apply_rotary_pos_emb": recorded},
        forward.__name__, forward.__defaults__, forward.__closure__)
    recording.__kwdefaults__ = forward.__kwdefaults__
    module, like = own, _numbers_of(own.q_proj)
    with torch.no_grad():
        numbers = Numbers(1)
        x = numbers(2, 3, module.q_proj.in_features, like=like)
        residual = numbers(2, 3, module.o_proj.out_features, like=like)
        scale, _, rotation, *_ = module._fftune
        angles = angles_of(numbers(1, 3, module.head_dim // 2), rotation)
        rows = torch.arange(3, dtype=torch.int32).repeat(2, 1)
        embeddings = angles.cos() * scale, angles.sin() * scale
        carry(embeddings[0], Rope(rotation, scale, embeddings[1], lambda: (angles, rows)))
        caches = [_Kept(), _Kept()]
        kept = [as_option(cache, module) if name_of_cache(type(module).forward) else {} for cache in caches]

        def theirs(x: Tensor) -> Tensor:
            y = recording(module, hidden_states=x, position_embeddings=embeddings, attention_mask=None, **kept[0])[0]
            # Small weights hide in the result which heads were rotated.
            if len(rotated) != 1:
                raise Unfit(f"projections: this {type(module).__name__} does not rotate")
            return y + residual

        subject = f"projections: {type(module).__name__}"
        expect_alike(theirs, lambda x: attend(module, x, residual, embeddings, **kept[1]), x,
                     subject=subject, free=(PATCHED,), reason=f"{subject} does not compute what is known")
        given, own_given = (cache.given for cache in caches)
        if len(given) != len(own_given) or not all(map(is_close, given, own_given)):
            raise Unfit(f"{subject} keeps something else in its cache")
        if not all(map(is_close, _heads(module, x, embeddings), rotated[0])):
            raise Unfit(f"{subject} does not compute what is known")
    return True


def projects(attention: nn.Module, x: Tensor, options: dict) -> bool:
    """Whether its projections are to be run by linear in a call with these options. A number of tokens that
    is not known while the model is compiled is taken for many."""
    # In the module itself: a wrapper that passes attributes on has to be called.
    settings = attention.__dict__.get("_fftune", ())
    if len(settings) != _SETTINGS or not settings[1] or drops(attention) or in_forward_mode() \
            or rope_of(options.get("position_embeddings")) is None and not (
                torch.compiler.is_compiling() and options.get("position_embeddings") is not None):
        return False
    layers = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    # A layer of compressed-tensors is a Linear without a weight.
    return (all(_has_codes(layer) or type(layer) is nn.Linear and are_plain(layer.weight, layer.bias)
                for layer in layers) and not watched(attention, *layers)
            and attention.config._attn_implementation in _BESIDE
            and (settings[1] is True or not torch.is_grad_enabled()
                 and (any(map(_has_codes, layers)) or has_fast_products(x))
                 and is_known(x.shape[0] * x.shape[1] <= _FEW_TOKENS)))


def _head_norms(attention: nn.Module) -> tuple[tuple[Tensor, Tensor] | None, float] | None:
    """Weights and eps of the norms of heads that the op qkv has; None if it has not."""
    norms = [attention._modules.get(name) for name in ("q_norm", "k_norm")]
    if "v_norm" in attention._modules:
        return None
    if norms == [None, None]:
        return None, 1e-6
    if not all(is_patched(norm, norm_forward) and not watched(norm) and are_plain(norm.weight)
               for norm in norms):
        return None
    (convention, eps), other = map(settings_of, norms)
    weights = tuple(norm.weight for norm in norms)
    if (convention, eps) != other or convention == "gemma" or any(
            w.shape != (attention.head_dim,) or w.dtype != _numbers_of(attention.q_proj).dtype
            for w in weights):
        return None
    return weights, eps


def _is_over_all_heads(norm: nn.Module, layer: nn.Linear) -> bool:
    weight = norm._parameters.get("weight")
    return weight is not None and weight.shape == (layer.out_features,)


def _heads(attention: nn.Module, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [batch, heads, tokens, features], normalised and rotated."""
    layers, rope = (attention.q_proj, attention.k_proj, attention.v_proj), rope_of(embeddings)
    scale, _, rotation, theirs, _ = attention._fftune
    norms = None if rope is None else _head_norms(attention)
    biases = [layer.bias for layer in layers]
    merged, rounded = merged_of(attention, layers), merged_fp8_of(attention, layers, x)
    if (rounded is not None or merged is not None and fits(merged[0], x)) and norms is not None \
            and not torch.is_grad_enabled() and has_kernels(x) \
            and not torch.is_autocast_enabled(x.device.type):
        weights, eps = norms
        w, w_scale, bias = rounded or (merged[0], None, merged[1])
        heads, kv_heads = (layer._fftune[0].n // attention.head_dim for layer in layers[:2])
        parts = ops.qkv(x if rounded else ordered(layers[0], x), w, heads, kv_heads, bias=bias, norms=weights,
                        eps=eps, positions=rope.rows, angles=rope.angles.flatten(0, 1), rotary=rope.angles.shape[-1],
                        scale=scale, rotation=rotation, w_scale=w_scale)
        return tuple(t.transpose(1, 2) for t in parts)
    if norms is not None and not torch.is_grad_enabled() \
            and not any(map(_has_codes, layers)) and len({b is None for b in biases}) == 1:
        weights, eps = norms
        heads, kv_heads = (layer.out_features // attention.head_dim for layer in layers[:2])
        parts = ops.qkv(x, tuple(layer.weight for layer in layers), heads, kv_heads,
                        bias=None if biases[0] is None else tuple(biases), norms=weights, eps=eps,
                        positions=rope.rows, angles=rope.angles.flatten(0, 1),
                        rotary=rope.angles.shape[-1], scale=scale, rotation=rotation)
        return tuple(t.transpose(1, 2) for t in parts)

    def project(layer: nn.Linear, norm: str) -> Tensor:
        projected = _linear(layer, x)
        own = attention._modules.get(norm)
        if own is not None and _is_over_all_heads(own, layer):
            return own(projected).unflatten(-1, (-1, attention.head_dim))
        heads = projected.unflatten(-1, (-1, attention.head_dim))
        return heads if own is None else own(heads)

    q, k, v = (project(layer, f"{name}_norm").transpose(1, 2)
               for name, layer in zip("qkv", layers))
    return *(theirs(q, k, *embeddings) if rope is None else rotate(q, k, rope)), v


def attend(self: nn.Module, hidden_states: Tensor, residual: Tensor | None,
            position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None = None,
            **options) -> Tensor:
    """o_proj(attention) + residual."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    *_, rate = self._fftune
    q, k, v = _heads(self, hidden_states, position_embeddings)
    cache = take_cache(options)
    if cache is not None:
        k, v = updated(cache, k, v, self.layer_idx, options)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    y, _ = attention(self, q, k, v, attention_mask, scaling=self.scaling,
                     dropout=getattr(self, rate) if rate and self.training else 0.0,
                     sliding_window=getattr(self, "sliding_window", None), **options)
    return _linear(self.o_proj, y.reshape(*hidden_states.shape[:-1], -1), residual)


def _attention_forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
                       attention_mask: Tensor | None) -> tuple[Tensor, None]:
    """The attention alone, as it is tried."""
    return attend(self, hidden_states, None, position_embeddings, attention_mask), None
