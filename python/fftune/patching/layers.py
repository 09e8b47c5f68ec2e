"""patch(model, whole_layers=True): the layers of a decoder by the op `layer`, a few tokens at a time.

A layer is recognised by its parts, and compared on random rows with what the op computes. In a call
that the op can run, the decoder's forward passes its layers a mask without elements, which
transformers hands through as it is. At that the first of the layers that one op can run runs them
all, and the others give back what they are given. All other calls run as before.

The op reads keys and values of all heads of a token next to each other. A static cache keeps its
shape, [batch, heads, tokens, features], but lies in memory as [batch, tokens, heads, features].
"""
import inspect
import itertools
import types
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import reference
from .._custom import OPS, call
from .._layer_ops import Choice, form_of, has_layout, parse
from . import attention as attentions
from .experts import experts_of, router_of
from .mlps import gated_of, plain_mlp_forward
from .norms import norm_forward
from .recognise import (PatchReport, Unfit, expect_no_hooks,
                        expect_plain_parameters, has_kernels, is_known, is_patched, kind_of, probing,
                        random_rows, remembered, try_to, undoable)
from .rotary import rotary_forward

MOST_TOKENS = 64  # of a call, in all sequences: more are a prefill
_MARK = (1, 1, 0, 1)
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class _Weight:
    """A tensor of a layer: a parameter of the module at the path, or some rows of it."""

    path: tuple[str, ...]
    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False  # the module has [in, out]

    def of(self, layer: nn.Module) -> Tensor:
        module = layer
        for name in self.path:
            module = module._modules[name]
        tensor = module._parameters[self.name]
        if self.transposed and tensor.dim() == 2:
            tensor = tensor.t()
        return tensor if self.rows is None else tensor[self.rows[0]:self.rows[1]]


@dataclass(frozen=True)
class _Spec:
    """What a layer is to the op."""

    form: str
    heads: tuple[int, int]  # of keys, and their features
    rotates: bool
    weights: tuple[_Weight, ...]  # in the form's order
    kinds: tuple[tuple[tuple[str, ...], type], ...]  # of the modules that have them
    index: int  # of its keys and values in a cache
    window: int | None  # keys that a query sees at most
    angles: str | None  # the type of layer by which the rotary embedding is told apart


class _Group:
    """Layers next to each other that differ in their weights alone."""

    def __init__(self, layers: list[nn.Module], specs: list[_Spec], rotary: nn.Module | None):
        self.layers, self.specs, self.rotary = layers, specs, rotary

    def is_as_recognised(self) -> bool:
        """Whether no module was exchanged since, by an adapter say, and nobody watches any."""
        for layer, spec in zip(self.layers, self.specs):
            if _watched(layer):
                return False
            for path, kind in spec.kinds:
                module = layer
                for name in path:
                    module = module._modules.get(name)
                if type(module) is not kind or _watched(module):
                    return False
        return True

    def run(self, x: Tensor, kv: list, embeddings, position_ids: Tensor | None) -> Tensor:
        first = self.specs[0]
        batch, s, _ = x.shape
        rows, angles = self._angles(x, embeddings, position_ids, first)
        caches = [kv[spec.index] for spec in self.specs]
        start = 0
        while start < len(caches):
            size, end = caches[start].keys.shape[2], start + 1
            while end < len(caches) and caches[end].keys.shape[2] == size:
                end += 1
            own = caches[start:end]
            lengths, slots = _places(own[0].cumulative_length, batch, s, size)
            weights = [w.of(self.layers[at]) for at in range(start, end)
                       for w in self.specs[at].weights]
            start = end
            tensors = [t for cache in own for t in (cache.keys, cache.values)]
            x = call(OPS.layer, x, rows, angles, slots, lengths, weights, tensors,
                     first.form)
            torch._foreach_add_([cache.cumulative_length for cache in own], s)
            for cache in own:
                if hasattr(cache, "cumulative_length_int"):
                    cache.cumulative_length_int += s
        return x

    def _angles(self, x, embeddings, position_ids, spec) -> tuple[Tensor | None, Tensor | None]:
        """The row of every token [batch, tokens], and the angles of the rows."""
        if not spec.rotates:
            return None, None
        batch, s, _ = x.shape
        if spec.angles is None:
            angles, rows = embeddings
            return rows, angles.flatten(0, 1)
        pairs = position_ids[..., None].float() * _frequencies(self.rotary, spec.angles)
        angles = torch.cat((pairs, pairs), -1).flatten(0, 1)
        rows = torch.arange(angles.shape[0], dtype=torch.int32, device=x.device)
        return rows.view(-1, s).expand(batch, -1).contiguous(), angles


class Layers:
    """Those of a decoder, and what its forward was before."""

    def __init__(self, groups: list[_Group], count: int, inner):
        self.groups, self.count, self.inner = groups, count, inner

    def serve(self, decoder: nn.Module, given: Tensor, options: dict) -> bool:
        """Whether the op runs the layers in this call."""
        cache = options.get("past_key_values")
        kv = getattr(cache, "layers", None)
        if (torch.is_grad_enabled() or decoder.training or kv is None or len(kv) < self.count
                or getattr(cache, "offloading", False) or options.get("use_cache") is False
                or options.get("encoder_hidden_states") is not None
                or options.get("is_causal") not in (None, True)
                or decoder.config.num_hidden_layers != self.count):
            return False
        embedding = decoder.get_input_embeddings().weight
        dtype, device = embedding.dtype, embedding.device
        if not has_kernels(embedding) or torch.is_autocast_enabled(device.type) \
                or given.is_floating_point() and given.dtype != dtype:
            return False
        batch, s = given.shape[:2]
        specs = [spec for group in self.groups for spec in group.specs]
        if any(type(kv[spec.index]).__name__ not in attentions.STATIC_LAYERS for spec in specs):
            return False
        for spec in specs:
            _lay_out(kv[spec.index], batch, spec, embedding)
        if not is_known(batch * s <= MOST_TOKENS):
            return False
        for name in ("output_attentions", "output_hidden_states"):
            wanted = options.get(name)
            if getattr(decoder.config, name, False) if wanted is None else wanted:
                return False
        for spec in specs:
            own = kv[spec.index]
            # A cache of a window's size is in the order of the tokens until it is full.
            if (own.keys.dtype != dtype or own.keys.device != device or own.keys.shape[0] != batch
                    or not has_layout(own.keys) or not has_layout(own.values)
                    or getattr(own, "cumulative_length_int", 0) + s > own.max_cache_len
                    or spec.window is not None and own.max_cache_len > spec.window):
                return False
        return (attentions.masks_nothing_else(options.get("attention_mask"))
                and all(group.is_as_recognised() for group in self.groups))


def _watched(module: nn.Module) -> bool:
    """Whether it has hooks, but those of transformers, which work only in calls that ask for it."""
    if module._forward_pre_hooks:
        return True
    return any(not hook.__module__.startswith("transformers.")
               for hook in module._forward_hooks.values())


def _lay_out(kv, batch: int, spec: _Spec, like: Tensor) -> None:
    """Keys and values in memory as the op reads them."""
    is_new = not kv.is_initialized
    if is_new:
        heads, dim = spec.heads
        nothing = like.new_empty(batch, heads, 0, dim)
        kv.lazy_initialization(nothing, nothing)
    elif has_layout(kv.keys) and has_layout(kv.values):
        return
    elif torch.compiler.is_compiling() or kv.keys.is_cuda \
            and torch.cuda.is_current_stream_capturing():
        return
    for name in ("keys", "values"):
        tensor = getattr(kv, name).transpose(1, 2).contiguous().transpose(1, 2)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)
        setattr(kv, name, tensor)


# Of every place in a cache: lengths and slots [cache, 2, sequences] of a token that goes there. Rows
# begin at addresses of 16 bytes.
_tables: OrderedDict[tuple, Tensor] = OrderedDict()
_TABLES = 8
_TABLE_ELEMENTS = 1 << 22


def _places(length: Tensor, batch: int, s: int, cache: int) -> tuple[Tensor, Tensor]:
    """lengths [batch] and slots [batch, s] of s tokens behind the first `length` ones."""
    device = length.device
    if torch.compiler.is_compiling() or 2 * cache * batch > _TABLE_ELEMENTS:
        place = length + torch.arange(s, device=device)
        starts = torch.arange(batch, device=device)[:, None] * cache
        # Behind the end there is no slot.
        slots = torch.where(place < cache, starts + place, -1).to(torch.int32)
        return (length + s).to(torch.int32).expand(batch).contiguous(), slots
    key = device, batch, cache
    table = _tables.get(key)
    if table is None:
        place = torch.arange(cache, dtype=torch.int32, device=device)[:, None]
        columns = -(-batch // 4) * 4
        starts = torch.arange(columns, dtype=torch.int32, device=device) * cache
        table = torch.stack(((place + 1).expand(-1, columns), place + starts), 1)
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _tables[key] = table
            while len(_tables) > _TABLES:
                _tables.popitem(last=False)
    if s == 1:  # one kernel, which refuses places behind the end
        found = table.index_select(0, length.view(1))
        return found[0, 0, :batch], found[0, 1, :batch, None]
    found = table.index_select(0, length + torch.arange(s, device=device))
    return found[-1, 0, :batch], found[:, 1, :batch].t().contiguous()


def _frequencies(rotary: nn.Module, kind: str) -> Tensor:
    return getattr(rotary, f"{kind}_inv_freq")


# what runs

def _is_mark(mask) -> bool:
    return isinstance(mask, Tensor) and mask.shape == _MARK


@undoable
def _decoder_forward(self, input_ids: Tensor | None = None, *arguments, **options):
    layers = self._fftune_layers
    given = input_ids if input_ids is not None else options.get("inputs_embeds")
    if not arguments and given is not None and layers.serve(self, given, options):
        mask = options.get("attention_mask")
        mark = torch.empty(_MARK, dtype=torch.int32, device=given.device)
        options["attention_mask"] = dict.fromkeys(mask, mark) if isinstance(mask, dict) else mark
    forward = layers.inner or type(self).forward
    return forward(self, input_ids, *arguments, **options)


@undoable
def _layer_forward(self, hidden_states: Tensor, *arguments, **options):
    inner, names, group, runs = self._fftune_layers
    bound = {**dict(zip(names, arguments)), **options}
    if _is_mark(bound.get("attention_mask")):
        if not runs:
            return hidden_states
        return group.run(hidden_states, bound["past_key_values"].layers,
                         bound.get("position_embeddings"), bound.get("position_ids"))
    return (inner or type(self).forward)(self, hidden_states, *arguments, **options)


# what is recognised

def _patch_layers(decoder: nn.Module, known: dict) -> str:
    """Of a decoder whose parts are patched as far as they can be."""
    layers = next((child for child in decoder.children()
                   if isinstance(child, nn.ModuleList) and len(child)), None)
    if layers is None:
        raise Unfit(f"{type(decoder).__name__} has no list of layers")
    recogniser = _Recogniser(decoder)
    specs = []
    for layer in layers:
        if _is_foreign(layer) or _watched(layer):
            raise Unfit(f"layers: {type(layer).__name__} has hooks, which would not be called")
        spec = recogniser.spec_of(layer)
        key = kind_of(layer), next(layer.parameters()).dtype, spec.form, spec.angles
        specs.append(spec)
        remembered(known, key, lambda: recogniser.expect(layer, spec))
    if any(not attentions.uses_interface(m) for m in decoder.modules() if hasattr(m, "is_causal")):
        raise Unfit(f"layers: the attention of {type(decoder).__name__} is not known")
    groups: list[_Group] = []
    for at, (layer, spec) in enumerate(zip(layers, specs)):
        last = groups[-1].specs[-1] if groups else None
        if last is None or (last.form, last.angles) != (spec.form, spec.angles):
            groups.append(_Group([], [], recogniser.rotary))
        groups[-1].layers.append(layer)
        groups[-1].specs.append(spec)
    for layer, spec in zip(layers, specs):
        for weight in spec.weights:
            if weight.transposed:
                _turn(layer, weight)
    for group in groups:
        for layer in group.layers:
            names = tuple(_parameters_of(layer)[2:])
            inner = getattr(layer.__dict__.get("forward"), "__func__", None)
            layer.__dict__["_fftune_layers"] = (inner, names, group, layer is group.layers[0])
            layer.__dict__["forward"] = types.MethodType(_layer_forward, layer)
    inner = getattr(decoder.__dict__.get("forward"), "__func__", None)
    decoder.__dict__["_fftune_layers"] = Layers(groups, len(layers), inner)
    decoder.__dict__["forward"] = types.MethodType(_decoder_forward, decoder)
    return (f"{len(layers)} layers of {type(decoder).__name__} by layer in calls of at most "
            f"{MOST_TOKENS} tokens with a static cache")


def restore_layers(module: nn.Module) -> None:
    """Takes back what patch_layers() left beside forwards."""
    found = module.__dict__.pop("_fftune_layers", None)
    if isinstance(found, tuple):
        _, _, group, _ = found
        spec = group.specs[next(i for i, layer in enumerate(group.layers) if layer is module)]
        for weight in spec.weights:
            if weight.transposed:
                _turn(module, weight, back=True)


def _turn(layer: nn.Module, weight: _Weight, back: bool = False) -> None:
    """The kernels read rows of outputs: the same numbers, the other way round in memory."""
    module = layer
    for name in weight.path:
        module = module._modules[name]
    parameter = module._parameters[weight.name]
    if parameter.dim() == 2 and parameter.is_contiguous() != back:
        data = parameter.data
        parameter.data = data.contiguous() if back else data.t().contiguous().t()


def _is_foreign(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return forward is not None and not hasattr(forward, "_fftune")


def _parameters_of(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)


_NORMS = {  # the names of a layer's norms, and what they are
    ("input_layernorm", "post_attention_layernorm"): ("attn_norm", "ffn_norm"),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
     "post_feedforward_layernorm"): ("attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm"),
    ("input_layernorm",): ("attn_norm",),
    ("ln_1", "ln_2"): ("attn_norm", "ffn_norm"),
}
_OUTPUTS = ("o_proj", "dense", "out_proj", "c_proj")


def _is_transposed(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class _Parts:
    """The tensors of a layer by their names in the op."""

    def __init__(self, layer: nn.Module):
        self.layer = layer
        self.weights: dict[str, _Weight] = {}
        self.kinds: list[tuple[tuple[str, ...], type]] = []

    def linear(self, path: tuple[str, ...], names: tuple[str, ...], rows: list[int] | None = None
               ) -> nn.Module:
        """A linear layer, whose rows are one weight or several."""
        module = self.layer.get_submodule(".".join(path))
        transposed = _is_transposed(module)
        if type(module) is not nn.Linear and not transposed:
            raise Unfit(f"layers: {path[-1]} is {type(module).__name__}, not Linear")
        expect_no_hooks(module)
        self.kinds.append((path, type(module)))
        ends = list(itertools.accumulate(rows)) if rows else [None]
        starts = [0, *ends[:-1]]
        for name, start, end in zip(names, starts, ends):
            part = None if end is None else (start, end)
            self.weights[f"w_{name}"] = _Weight(path, "weight", part, transposed)
            if module.bias is not None:
                self.weights[f"b_{name}"] = _Weight(path, "bias", part, transposed)
        return module

    def norm(self, path: tuple[str, ...], name: str) -> None:
        module = self.layer.get_submodule(".".join(path))
        self.kinds.append((path, type(module)))
        self.weights[name] = _Weight(path, "weight")
        if isinstance(module, nn.LayerNorm):
            if module.weight is None or module.bias is None:
                raise Unfit("layers: a LayerNorm without weight and bias")
            self.weights[f"{name}_bias"] = _Weight(path, "bias")


class _Recogniser:
    def __init__(self, decoder: nn.Module):
        self.decoder = decoder
        rotaries = [child for child in decoder.children() if hasattr(child, "rope_type")]
        if len(rotaries) > 1:
            raise Unfit("layers: several rotary embeddings")
        self.rotary = rotaries[0] if rotaries else None

    def spec_of(self, layer: nn.Module) -> _Spec:
        expect_plain_parameters(layer)
        if len({parameter.dtype for parameter in layer.parameters()}) > 1:
            raise Unfit("layers: weights of several types")
        parts = _Parts(layer)
        names = {name for name, child in layer.named_children() if _has_parameters(child)}
        attention_name = next((n for n in ("self_attn", "attn") if n in names), None)
        norms = next((n for n in _NORMS if names - {attention_name, "mlp"} == set(n)), None)
        if attention_name is None or "mlp" not in names or norms is None:
            raise Unfit(f"layers: {type(layer).__name__} has other parts than norms, attention and "
                        f"an MLP: {', '.join(sorted(names))}")
        settings = set()
        for name, ours in zip(norms, _NORMS[norms]):
            parts.norm((name,), ours)
            settings.add(self._norm_of(layer._modules[name]))
        attention = layer._modules[attention_name]
        options = self._attention(parts, attention_name, attention, settings)
        options |= self._mlp(parts, layer.mlp)
        if len(settings) > 1:
            raise Unfit("layers: norms that differ in their eps, or in how they round")
        (convention, eps), = settings
        kind, rotary = self._rotation(attention)
        form = form_of(tuple(parts.weights), convention=convention, eps=eps, rotary=rotary,
                       rotates=rotary > 0, softcap=self._softcap(attention),
                       rope_scale=self._rope_scale(kind) if rotary else 0.0, **options)
        order = parse(form).weights
        window = getattr(attention, "sliding_window", None)
        if window is None and not hasattr(attention, "layer_type"):
            window = attentions.window_of(self.decoder.config)
        heads = options["kv_heads"], options["dim"]
        for name in (attention_name, "mlp"):
            parts.kinds.append(((name,), type(layer._modules[name])))
        return _Spec(form, heads, rotary > 0, tuple(parts.weights[name] for name in order), tuple(parts.kinds),
                     attention.layer_idx, window, kind)

    def _norm_of(self, module: nn.Module) -> tuple[str, float]:
        expect_no_hooks(module)
        if isinstance(module, nn.LayerNorm):
            return "llama", module.eps
        if not is_patched(module, norm_forward):
            raise Unfit(f"layers: {type(module).__name__} is no norm that is known")
        return module._fftune

    def _attention(self, parts: _Parts, at: str, attention: nn.Module, settings: set) -> dict:
        children = {n for n, child in attention.named_children() if _has_parameters(child)}
        output = next((n for n in _OUTPUTS if n in children), None)
        inputs = children - {output, "q_norm", "k_norm"}
        dim = getattr(attention, "head_dim", None)
        if output is None or not isinstance(dim, int):
            raise Unfit(f"layers: {type(attention).__name__} is not known")
        d = parts.linear((at, output), ("o",)).weight
        width = d.shape[0] if _is_transposed(attention._modules[output]) else d.shape[1]
        heads = width // dim
        if inputs == {"q_proj", "k_proj", "v_proj"}:
            for name in "qkv":
                parts.linear((at, f"{name}_proj"), (name,))
            kv_heads = attention.k_proj.out_features // dim
        elif len(inputs) == 1:
            name, = inputs
            module = attention._modules[name]
            if type(module) is not nn.Linear and not _is_transposed(module):
                raise Unfit(f"layers: {name} is {type(module).__name__}, not Linear")
            rows = module.nf if _is_transposed(module) else module.out_features
            kv_heads = (rows // dim - heads) // 2
            if (heads + 2 * kv_heads) * dim != rows:
                raise Unfit(f"layers: {name} does not give heads of {dim} features")
            parts.linear((at, name), ("q", "k", "v"), [heads * dim] + [kv_heads * dim] * 2)
        else:
            raise Unfit(f"layers: {type(attention).__name__} has other parts than q, k, v and an "
                        f"output: {', '.join(sorted(children))}")
        for name in ("q_norm", "k_norm"):
            if name in children:
                parts.norm((at, name), name)
                settings.add(self._norm_of(attention._modules[name]))
        scale = getattr(attention, "scaling", None)
        usual = scale is None or abs(scale * dim ** 0.5 - 1) < 1e-9
        return dict(heads=heads, kv_heads=kv_heads, dim=dim, scale=0.0 if usual else float(scale))

    def _softcap(self, attention: nn.Module) -> float:
        """PyTorch's own attention, "sdpa", leaves it out."""
        softcap = getattr(attention, "attn_logit_softcapping", None)
        by_module = self.decoder.config._attn_implementation == attentions.EAGER
        return float(softcap) if softcap and by_module else 0.0

    def _mlp(self, parts: _Parts, mlp: nn.Module) -> dict:
        if (gated := gated_of(mlp)) is not None:
            if gated.up is None:
                h = mlp.get_submodule(gated.down).in_features
                parts.linear(("mlp", *gated.gate.split(".")),
                             ("up", "gate") if gated.up_first else ("gate", "up"), [h, h])
            else:
                parts.linear(("mlp", *gated.gate.split(".")), ("gate",))
                parts.linear(("mlp", *gated.up.split(".")), ("up",))
            parts.linear(("mlp", *gated.down.split(".")), ("down",))
            return dict(act=gated.act)
        if is_patched(mlp, plain_mlp_forward):
            first, second, _, act, _ = mlp._fftune
            parts.linear(("mlp", first), ("up",))
            parts.linear(("mlp", second), ("down",))
            return dict(act=act)
        children = {n: child for n, child in mlp.named_children() if _has_parameters(child)}
        if "experts" in children:
            return self._mixture(parts, children)
        raise Unfit(f"layers: {type(mlp).__name__} is no MLP that is known")

    def _mixture(self, parts: _Parts, children: dict[str, nn.Module]) -> dict:
        """A router and experts, both patched."""
        others = [name for name in children if name != "experts"]
        router = router_of(children[others[0]]) if len(others) == 1 else None
        experts = experts_of(children["experts"])
        if router is None or experts is None or not router.is_simple or "bias" in children[others[0]]._parameters \
                or experts.transposed or experts.biased:
            raise Unfit(f"layers: a mixture of {', '.join(sorted(children))} is not known")
        for name in children:
            expect_no_hooks(children[name])
            parts.kinds.append((("mlp", name), type(children[name])))
        parts.weights["w_router"] = _Weight(("mlp", others[0]), "weight")
        parts.weights["w_gate_up"] = _Weight(("mlp", "experts"), "gate_up_proj")
        parts.weights["w_down"] = _Weight(("mlp", "experts"), "down_proj")
        gate = children[others[0]]
        return dict(act=experts.act,
                    choice=Choice(gate.weight.shape[0], gate.top_k, router.score, router.order,
                                  router.renormalise, experts.packing))

    def _rotation(self, attention: nn.Module) -> tuple[str | None, int]:
        """The type of layer, where angles depend on it, and how many features are rotated."""
        rotary = self.rotary
        if rotary is None:
            return None, 0
        if isinstance(rotary.rope_type, dict):
            kind = getattr(attention, "layer_type", None)
            if rotary.rope_type.get(kind) not in _STATIC_ROPES:
                raise Unfit("layers: its frequencies change with the length")
            return kind, 2 * _frequencies(rotary, kind).numel()
        if not is_patched(rotary, rotary_forward):
            raise Unfit(f"layers: {type(rotary).__name__} was not replaced")
        return None, 2 * rotary.inv_freq.numel()

    def _rope_scale(self, kind: str | None) -> float:
        name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
        scale = float(getattr(self.rotary, name, 1.0))
        return 0.0 if scale == 1.0 else scale

    def expect(self, layer: nn.Module, spec: _Spec) -> bool:
        """That it computes what the op does: two tokens of two sequences behind three others."""
        like = spec.weights[0].of(layer)
        # Rows of which two experts have nearly the same score may be given another one after
        # rounding: then other rows tell.
        tries = 4 if parse(spec.form).get("experts") else 1
        rows = random_rows(tries, 2, 2, like.shape[0], like=like)
        if not any(self._is_same(layer, spec, x) for x in rows):
            raise Unfit(f"layers: {type(layer).__name__} does not compute what is known")
        return True

    def _is_same(self, layer: nn.Module, spec: _Spec, x: Tensor) -> bool:
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer

        weights = [w.of(layer) for w in spec.weights]
        like, (batch, s, before, size) = weights[0], (*x.shape[:2], 3, 8)
        past = random_rows(2, batch, size, *spec.heads, like=like)
        ours = [t.clone().transpose(1, 2) for t in past]
        kv = StaticLayer(size)
        if not hasattr(kv, "cumulative_length"):
            raise Unfit("the static cache of this transformers does not count its tokens: whole "
                        "layers need version 5")
        kv.lazy_initialization(*ours)
        kv.keys, kv.values = (t.clone().transpose(1, 2) for t in past)
        kv.cumulative_length.fill_(before)
        cache = StaticCache(config=self.decoder.config, max_cache_len=size)
        cache.layers[spec.index] = kv
        position_ids = torch.arange(before, before + s, device=x.device)[None]
        lengths, slots = _places(kv.cumulative_length, batch, s, size)
        mask = torch.arange(size, device=x.device) <= position_ids[0][:, None]
        mask = mask.expand(batch, 1, s, size)
        if self.decoder.config._attn_implementation == attentions.EAGER:
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(
                ~mask, torch.finfo(x.dtype).min)
        with probing(layer):
            options, embeddings = {}, None
            if self.rotary is not None:
                kinds = () if spec.angles is None else (spec.angles,)
                embeddings = self.rotary(x, position_ids, *kinds)
                options["position_embeddings"] = embeddings
            theirs = layer(x, attention_mask=mask, past_key_values=cache, use_cache=True,
                           position_ids=position_ids, **options)
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            group = _Group([layer], [spec], self.rotary)
            rows, angles = group._angles(x, embeddings, position_ids, spec)
            mine = reference.layer(x, rows, angles, slots, lengths, weights, ours, spec.form)
        eps = torch.finfo(x.dtype).eps
        factor = 64 if x.dtype == torch.float32 else 8
        for own, other in ((mine, theirs), (ours[0], kv.keys), (ours[1], kv.values)):
            change = (other.double() - (x.double() if own is mine else 0)).norm()
            error = (own.double() - other.double()).norm()
            if own.shape != other.shape or not error <= eps * (factor * change
                                                               + 2 * other.double().norm()):
                return False
        return True


# all decoders of a model

def patch_whole_layers(model: nn.Module, report: PatchReport) -> None:
    decoders = [(name, m) for name, m in model.named_modules() if attentions.makes_causal_mask(m)]
    if not decoders:
        report.left.append(("", "layers: there is no decoder that is known"))
    if not decoders or not attentions.is_available():
        return
    before = {m: m.config for m in model.modules() if hasattr(m, "config")}
    attentions.choose_lengths(model)
    known: dict = {}
    failed, served = [], set()
    for name, decoder in decoders:
        replaced = len(report.replaced)
        try_to(report, name, lambda: _patch_layers(decoder, known))
        if len(report.replaced) == replaced:
            failed.append(decoder)
        else:
            served.update(decoder.modules())
    # Lengths in the place of masks are for the attention of layers that were recognised.
    parts = {m for decoder in failed for m in decoder.modules()}
    theirs = {id(before[decoder]) for decoder in failed}
    for module, config in before.items():
        if not served or module not in served and (module in parts or id(config) in theirs):
            module.config = config
