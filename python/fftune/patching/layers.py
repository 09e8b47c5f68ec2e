"""patch(model, whole_layers=True): the layers of a decoder by the op `layer`, a few tokens at a time.

A layer is recognised by its parts, and compared on random rows with what the op computes. In a call
that the op can run, the decoder's forward passes its layers a mask without elements, which
transformers hands through as it is. At that the first of the layers that one op can run runs them
all, and the others give back what they are given. All other calls run as before.

The op reads keys and values of all heads of a token next to each other. A static cache keeps its
shape, [batch, heads, tokens, features], but lies in memory as [batch, tokens, heads, features]. Latents and
rotated keys, of layers with latent attention, lie together in rows, [batch, tokens, rank + rope].
"""
import inspect
import operator
from collections import OrderedDict

import torch
from torch import Tensor, nn

from .._custom import OPS, call
from .._layer_form import FLOAT32, float8_form, parse
from .._library import Error
from .._ops.layer import expect_runs, has_layout
from .._versions import CACHE_NAMES, cache_of, is_known, pytree
from . import attention as attentions
from .mxfp4 import is_packed_mixture
from .fp8_experts import is_rounded_experts
from .fp8_linear import MERGED, is_rounded_fp8, stays_merged
from .quantised import is_quantised
from .layer_mixers import can_write, mark_as_written, slots_of, states_of
from .layer_specs import Part, Recogniser, Spec, Weight, calls_of_layers
from .recognise import (PatchReport, Unfit, expect_methods, has_hooks, has_kernels, method_of,
                        try_to, undoable, watched)
from .rotary import angles_of, frequencies, rotation_of, rope_of

_MERGED = ("q_proj", "k_proj", "v_proj")  # whose packed weights are rows of one
MOST_TOKENS = 64  # of a call, in all sequences: more are a prefill
_MARK = (1, 1, 0, 1)
_MARK_NAME = "fftune_mark"  # of an argument, where a decoder hands its layers all that it does not know, but no mask
# Arguments of a decoder that change nothing between its layers, or are looked at.
_OPTIONS = {*CACHE_NAMES, "attention_mask", "position_ids", "inputs_embeds", "use_cache",
            "cache_position", "encoder_hidden_states", "is_causal", "output_attentions",
            "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}


class _Group:
    """Layers next to each other that differ in their weights alone."""

    def __init__(self, rotary: nn.Module | None, gives_pairs: bool):
        self.gives_pairs = gives_pairs  # the other of which is None: attention's weights, say
        self.layers: list[nn.Module] = []
        self.specs: list[Spec] = []
        self.typed: list[dict[tuple[str, ...], list[str]]] = []
        # By the scales of caches of float8_e4m3fn, as float8_form() gives it; None where no kernel runs the layers.
        self.float8: dict[str, tuple[str, int] | None] = {}
        self.rotary, self.rotary_part = rotary, rotary and Part.of((), rotary)
        self.reads_masks = False  # by attention that is not transformers' interface

    def add(self, layer: nn.Module, spec: Spec) -> None:
        self.reads_masks |= spec.attends and not any(map(attentions.uses_interface, layer.modules()))
        self.layers.append(layer)
        self.specs.append(spec)
        self.typed.append(_of_tokens_type(spec))

    def is_as_recognised(self, decoder: nn.Module) -> bool:
        """Whether no module was changed since, or exchanged, by an adapter say, and nobody watches any."""
        path = self.specs[0].angles and self.specs[0].angles.path
        if path is not None and (
                decoder.get_submodule(path) is not self.rotary or watched(self.rotary)
                or not self.rotary_part.is_as_recognised(self.rotary)
                or not self.specs[0].is_told and (not rotation_of(self.rotary) or torch.compiler.is_compiling())):
            return False
        dtype = decoder.get_input_embeddings().weight.dtype
        for layer, spec, typed in zip(self.layers, self.specs, self.typed):
            modules = []
            for part in spec.parts:
                path, module = part.path, layer
                for name in path:
                    module = module._modules.get(name)
                if not part.is_as_recognised(module):
                    return False
                if path in spec.packed and not is_quantised(module) and not is_packed_mixture(module):
                    return False  # a state dict was loaded
                if path in spec.packed and path[-1] in _MERGED and "_fftune_shared" not in module.__dict__:
                    return False  # they got another type
                if path in spec.rounded and not is_rounded_experts(module) and not (
                        is_rounded_fp8(module) and module.weight.dtype == torch.float8_e4m3fn):
                    return False
                if any(module._parameters[name].dtype != dtype for name in typed.get(path, ())):
                    return False  # one weight got another type
                modules.append(module)
            if watched(*modules) or spec.rounded and not _is_merged(layer, spec):
                return False
        return True

    def run(self, x: Tensor, kv: list, embeddings, position_ids: Tensor | None,
            layer_input: Tensor | None = None) -> Tensor:
        first = self.specs[0]
        of_call = {} if layer_input is None else {"layer_input": layer_input.contiguous()}
        if first.factors is not None:
            positions = position_ids[:, -x.shape[1]:].expand(x.shape[0], -1)
            of_call["q_factors"] = first.factors.of(positions, x.dtype).contiguous()
        batch, s, _ = x.shape
        if not first.mixes:
            weights = [w.of(layer) for layer, spec in zip(self.layers, self.specs) for w in spec.weights]
            return call(OPS.network, x, weights, first.form)
        if first.states and not first.has_both:
            return self._run_with_states(x, [kv[spec.index] for spec in self.specs])
        rows, angles = self._angles(x, embeddings, position_ids, first)
        caches = [kv[spec.index] for spec in self.specs]
        start = 0
        while start < len(caches):
            size, kind, end = caches[start].keys.shape[2], attentions.format_of(caches[start]), start + 1
            while end < len(caches) and (caches[end].keys.shape[2], attentions.format_of(caches[end])) == (size, kind):
                end += 1
            own = caches[start:end]
            if first.takes_keys:  # they have the new tokens already
                lengths, slots = own[0].cumulative_length.to(torch.int32).expand(batch).contiguous(), None
            else:
                lengths, slots = _places(own[0].cumulative_length, batch, s, size)
            form, weights = self.given(start, own, of_call)
            start = end
            x = call(OPS.layer, x, rows, angles, slots, lengths, None, weights, self.states(own, batch, x), form, None,
                     None)
            if first.takes_keys:
                continue
            torch._foreach_add_([cache.cumulative_length for cache in own], s)
            for cache in own:
                if hasattr(cache, "cumulative_length_int"):
                    cache.cumulative_length_int += s
                if first.has_both:
                    mark_as_written(cache)
        return x

    def given(self, start: int, caches: list, of_call: dict[str, Tensor] | None = None) -> tuple[str, list[Tensor]]:
        """The form and the weights of the layers from `start` on that have these caches, all of one format. `of_call`:
        what a call gives in the place of weights."""
        form, scales, weights = self.specs[start].form, None, []
        if self.specs[start].attends:
            scales = attentions.format_of(caches[0])
        form, at = self.float8[scales] if scales else (form, 0)
        for layer, spec, cache in zip(self.layers[start:], self.specs[start:], caches):
            own = [w.of(layer) if w.given is None else of_call[w.name] for w in spec.weights]
            weights += [*own[:at], cache.k_scale, cache.v_scale, *own[at:]] if scales else own
        return form, weights

    def states(self, caches: list, batch: int, like: Tensor) -> list[Tensor]:
        """The tensors of these caches as the op reads and writes them: keys and values, rows of latents, or states."""
        first = self.specs[0]
        if first.has_both:  # all of them have one shape
            return [t for own in caches for t in (own.keys, own.values, *states_of(own, first, batch, like))]
        if first.states:
            return [t for own, spec in zip(caches, self.specs) for t in states_of(own, spec, batch, like)]
        return [_rows_of(cache) for cache in caches] if first.is_latent else \
            [t for cache in caches for t in (cache.keys, cache.values)]

    def reads(self, cache, spec: Spec, like: Tensor) -> bool:
        """Whether the op reads and writes the cache of a layer. Scales of float8_e4m3fn come from the first call, which
        runs layer by layer. On a GPU all calls with such a cache do: no layers have been timed with one there."""
        scales = attentions.format_of(cache)
        if not scales:
            return scales is not None
        if spec.is_latent or spec.has_both or spec.takes_keys or spec.given or like.is_cuda or not cache.has_scales:
            return False
        if scales not in self.float8 and not torch.compiler.is_compiling():
            self.float8[scales] = self._float8_form(scales, like)
        return self.float8.get(scales) is not None

    def _float8_form(self, scales: str, like: Tensor) -> tuple[str, int] | None:
        spec = self.specs[0]
        form, at = float8_form(spec.form, scales)
        own = [w.of(self.layers[0]) for w in spec.weights]
        scale = like.new_ones(spec.heads[0] if scales == "head" else 1, dtype=torch.float32)
        try:
            expect_runs(form, [*own[:at], scale, scale, *own[at:]], -1)
        except Error:
            return None
        return form, at

    def _run_with_states(self, x: Tensor, caches: list) -> Tensor:
        weights = [w.of(layer) for layer, spec in zip(self.layers, self.specs) for w in spec.weights]
        slots = slots_of(self.specs[0], x.shape[0], x.device)
        form = self.specs[0].form_in(x.shape[1], not caches[0].has_previous_state[0])
        x = call(OPS.layer, x, None, None, slots, None, None, weights, self.states(caches, x.shape[0], x), form, None,
                 None)
        for own in caches:
            mark_as_written(own)
        return x

    def _angles(self, x, embeddings, position_ids, spec) -> tuple[Tensor | None, Tensor | None]:
        """The row of every token [batch, tokens], and the angles of the rows."""
        if spec.rotation is None:
            return None, None
        batch, s, _ = x.shape
        if spec.rotation == rotation_of(self.rotary) and (rope := rope_of(embeddings)) is not None:
            return rope.rows, rope.angles.flatten(0, 1)
        pairs = position_ids[:, -s:, None].float() * frequencies(self.rotary, spec.angles.kind)
        angles = angles_of(pairs, spec.rotation).flatten(0, 1)
        rows = torch.arange(angles.shape[0], dtype=torch.int32, device=x.device)
        return rows.view(-1, s).expand(batch, -1).contiguous(), angles


def _of_tokens_type(spec: Spec) -> dict[tuple[str, ...], list[str]]:
    """The parameters of a layer's modules that the op takes in the type of its tokens alone, by their paths."""
    found = {}
    for name, weight in zip(parse(spec.form).weights, spec.weights):
        if name not in FLOAT32 and weight.path not in spec.packed | spec.rounded:
            found.setdefault(weight.path, set()).add("weight" if weight.zeros else weight.name)
    parameters = {part.path: part.parameters for part in spec.parts}
    return {path: sorted(names & parameters[path]) for path, names in found.items()}


def _is_merged(layer: nn.Module, spec: Spec) -> bool:
    """Whether q, k and v of a layer that rounds activations are rows of one weight, as when it was recognised."""
    path = next((weight.path for weight in spec.weights if weight.name == MERGED[0]), None)
    if path is None:  # its attention is dense
        return True
    attention = layer.get_submodule(".".join(path))
    return stays_merged(attention, [attention._modules[f"{name}_proj"] for name in "qkv"])


class Layers:
    """Those of a decoder, and what its forward was before."""

    def __init__(self, groups: list[_Group], own: nn.ModuleList, inner, decoder: nn.Module,
                 masks: tuple[str, ...] | None = (), counts_by_mask: bool = False):
        # The kinds of layers by which the decoder takes masks, where one mask does not reach all; None: none does.
        self.masks, self.counts_by_mask = masks, counts_by_mask
        self.groups, self.own, self.count, self.inner = groups, own, len(own), inner
        self.caches = 1 + max((spec.index for group in groups for spec in group.specs if spec.mixes), default=-1)
        self.takes_inputs = any("layer_input" in spec.given for group in groups for spec in group.specs)
        self.shares = any(spec.takes_keys for group in groups for spec in group.specs)
        self.attention = decoder.config._attn_implementation
        self.config = attentions.config_read_by(decoder)
        self.causal = [m for m in own.modules() if getattr(m, "is_causal", None) is True]

    def mask_as_recognised(self, decoder: nn.Module) -> bool:
        """Whether the decoder still has the attention and settings that it had, and is causal."""
        return (decoder.config._attn_implementation == self.attention
                and attentions.reads_the_same(decoder.config, self.config)
                and all(m.is_causal is True for m in self.causal))

    def are_called(self, decoder: nn.Module) -> bool:
        """Whether the decoder still calls these layers: a wrapper may have taken the place of one."""
        layers = [layer for group in self.groups for layer in group.layers]
        return (any(child is self.own for child in decoder._modules.values())
                and len(self.own) == self.count
                and all(map(operator.is_, self.own._modules.values(), layers)))

    def serve(self, decoder: nn.Module, given: Tensor, options: dict) -> bool:
        """Whether the op runs the layers in this call."""
        # Others may change what is between layers, or the positions that they rotate by.
        if any(value is not None and value is not False for name, value in options.items()
               if name not in _OPTIONS and not (self.takes_inputs and name == "per_layer_inputs")):
            return False
        positions = options.get("position_ids")
        if positions is not None and positions.dim() != 2:
            return False
        # Layers that take another one's keys are then given the last tokens alone.
        kept = options.get("logits_to_keep")
        if self.shares and kept is not None and not (isinstance(kept, int) and kept == 0) \
                and not is_known(given.shape[1] == 1):
            return False
        cache = cache_of(options)
        kv = getattr(cache, "layers", None)
        if (torch.is_grad_enabled() or decoder.training or kv is None or len(kv) < self.caches
                or getattr(cache, "offloading", False) or options.get("use_cache") is False
                or options.get("encoder_hidden_states") is not None
                or options.get("is_causal") not in (None, True)
                or not self.mask_as_recognised(decoder)):
            return False
        embedding = decoder.get_input_embeddings().weight
        dtype, device = embedding.dtype, embedding.device
        if not has_kernels(embedding) or torch.is_autocast_enabled(device.type) \
                or given.is_floating_point() and given.dtype != dtype:
            return False
        batch, s = given.shape[:2]
        every = [spec for group in self.groups for spec in group.specs]
        specs = [spec for spec in every if spec.attends]
        if any(spec.wide for spec in every) and dtype != torch.float32:
            return False
        if any(not group.reads(kv[spec.index], spec, embedding) for group in self.groups for spec in group.specs
               if spec.attends) \
                or any(spec.states and not can_write(kv[spec.index], spec, batch, embedding) for spec in every):
            return False
        # Layers that were changed since may keep keys of another shape.
        if any(not kv[spec.index].is_initialized for spec in specs) and not self.are_as_recognised(decoder):
            return False
        for spec in specs:
            _lay_out(kv[spec.index], batch, spec, embedding)
        if not is_known(batch * s <= MOST_TOKENS):
            return False
        for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
            wanted = options.get(name)
            if getattr(decoder.config, name, False) if wanted is None else wanted:
                return False
        for spec in specs:
            own = kv[spec.index]
            # A cache of a window's size is in the order of the tokens until it is full.
            kept = torch.float8_e4m3fn if attentions.format_of(own) else dtype
            if (own.keys.dtype != kept or own.keys.device != device or own.keys.shape[0] != batch
                    or not _lies_as_read(own, spec)
                    or getattr(own, "cumulative_length_int", 0) + s > own.max_cache_len
                    or spec.window is not None and own.max_cache_len > spec.window):
                return False
        mask = options.get("attention_mask")
        return ((mask is None if not specs else
                 attentions.masks_nothing_else(mask, kv[specs[0].index].cumulative_length, s))
                and self.are_as_recognised(decoder))

    def positions_of(self, given: Tensor, cache) -> Tensor:
        """The positions [batch, tokens] of a call's tokens behind those of a cache."""
        spec = next(spec for group in self.groups for spec in group.specs if spec.attends)
        places = torch.arange(given.shape[1], device=given.device) + cache.layers[spec.index].cumulative_length
        return places.expand(given.shape[0], -1)

    def are_as_recognised(self, decoder: nn.Module) -> bool:
        """Whether the decoder calls its layers as they were, and nobody sees what they are given."""
        return self.are_called(decoder) and all(group.is_as_recognised(decoder) for group in self.groups)


def _lay_out(kv, batch: int, spec: Spec, like: Tensor) -> None:
    """Keys and values in memory as the op reads them."""
    if not kv.is_initialized:
        shapes = [(1, 0, width) for width in spec.heads] if spec.is_latent else [(spec.heads[0], 0, spec.heads[1])] * 2
        kv.lazy_initialization(*(like.new_empty(batch, *shape) for shape in shapes))
    elif _lies_as_read(kv, spec):
        return
    elif torch.compiler.is_compiling() or kv.keys.is_cuda \
            and torch.cuda.is_current_stream_capturing():
        return
    if spec.is_latent:
        if not torch.compiler.is_compiling():
            _lay_in_rows(kv)
        return
    for name in ("keys", "values"):
        given = getattr(kv, name)
        _, heads, size, dim = given.shape
        # Not a view: with gradients nobody may write to one that was made without them.
        tensor = torch.empty_strided(given.shape, (size * heads * dim, dim, heads * dim, 1),
                                     dtype=given.dtype, device=given.device)
        tensor.copy_(given)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(tensor)
        setattr(kv, name, tensor)


def _lies_as_read(kv, spec: Spec) -> bool:
    """Whether keys and values lie in memory as the op reads them."""
    if not spec.is_latent:
        return has_layout(kv.keys) and has_layout(kv.values)
    # A compiler does not know that both are parts of one tensor.
    if torch.compiler.is_compiling() or kv.keys.shape[1] != 1 or kv.keys.shape[:3] != kv.values.shape[:3]:
        return False
    batch, _, size, rank = kv.keys.shape
    width = rank + kv.values.shape[3]
    return (kv.keys.stride() == kv.values.stride() == (size * width, size * width, width, 1)
            and kv.keys.untyped_storage().data_ptr() == kv.values.untyped_storage().data_ptr()
            and kv.values.storage_offset() == kv.keys.storage_offset() + rank
            and kv.values.data_ptr() == kv.keys.data_ptr() + rank * kv.keys.element_size())


def _lay_in_rows(kv) -> None:
    """Latents and rotated keys become parts of the rows of one tensor."""
    batch, _, size, rank = kv.keys.shape
    width = rank + kv.values.shape[3]
    rows = torch.cat((kv.keys, kv.values), -1).contiguous()
    for name, first, features in (("keys", 0, rank), ("values", rank, width - rank)):
        # Not a view: with gradients nobody may write to one that was made without them.
        tensor = rows.new_empty(0).set_(rows.untyped_storage(), first, (batch, 1, size, features),
                                        (size * width, size * width, width, 1))
        torch._dynamo.mark_static_address(tensor)
        setattr(kv, name, tensor)


def _rows_of(kv) -> Tensor:
    """The rows [batch, tokens, rank + rope] whose parts are keys and values."""
    batch, _, size, rank = kv.keys.shape
    width = rank + kv.values.shape[3]
    return kv.keys.as_strided((batch, size, width), (size * width, width, 1))


# For every place in a cache: lengths and slots [cache, 2, sequences] of a token that goes there.
# Rows begin at addresses of 16 bytes.
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
        kinds = mask if isinstance(mask, dict) else layers.masks
        options |= _marks_of(kinds, mark)
        if layers.counts_by_mask and options.get("position_ids") is None:
            options["position_ids"] = layers.positions_of(given, cache_of(options))
        known = True
    else:
        known = torch.compiler.is_compiling() or not _is_static(cache_of(options)) or layers.are_as_recognised(self)
    forward = layers.inner or type(self).forward
    if known:
        return forward(self, input_ids, *arguments, **options)
    with attentions.plain_masks():
        return forward(self, input_ids, *arguments, **options)


def _is_static(cache) -> bool:
    return any(attentions.format_of(own) is not None for own in getattr(cache, "layers", ()))


@undoable
def _layer_forward(self, hidden_states: Tensor, *arguments, **options):
    inner, names, group, runs = self._fftune_layers
    bound = {**dict(zip(names, arguments)), **options}
    if _is_mark(bound.get("attention_mask")) or _is_mark(bound.get(_MARK_NAME)):
        if runs:
            hidden_states = group.run(hidden_states, cache_of(bound).layers, bound.get("position_embeddings"),
                                      bound.get("position_ids"), bound.get("per_layer_input"))
        return (hidden_states, None) if group.gives_pairs else hidden_states
    if group.reads_masks and attentions.are_lengths(bound.get("attention_mask")):
        own = cache_of(bound).layers[group.specs[group.layers.index(self)].index]
        keys, _ = own.get_mask_sizes(hidden_states.shape[1])
        bound["attention_mask"] = attentions.mask_for_module(bound["attention_mask"], hidden_states, keys)
        arguments, options = (), bound
    return (inner or type(self).forward)(self, hidden_states, *arguments, **options)


# what is recognised

def _patch_layers(decoder: nn.Module, known: dict) -> str:
    """For a decoder whose parts are patched as far as they can be."""
    lists = [(name, child) for name, child in decoder.named_children()
             if isinstance(child, nn.ModuleList) and next(child.parameters(), None) is not None]
    if len(lists) != 1:
        raise Unfit(f"layers: {type(decoder).__name__} has {len(lists) or 'no'} lists of layers of its own")
    (name, layers), = lists
    expect_methods(decoder, "forward")
    if getattr(decoder.config, "is_causal", True) is not True:
        raise Unfit(f"layers: {type(decoder).__name__} is not causal by its configuration")
    seen = set()
    for layer in layers:
        if layer in seen or "_fftune_layers" in layer.__dict__:
            raise Unfit(f"layers: a {type(layer).__name__} is called at several places")
        seen.add(layer)
    recogniser = Recogniser(decoder, name, known)
    specs = []
    for at, layer in enumerate(layers):
        if _is_foreign(layer) or has_hooks(layer):
            raise Unfit(f"layers: {type(layer).__name__} has hooks, which would not be called")
        specs.append(recogniser.spec_of(layer, at))
    if any(not attentions.uses_interface(m) for m in decoder.modules() if hasattr(m, "is_causal")):
        raise Unfit(f"layers: the attention of {type(decoder).__name__} is not known")
    groups: list[_Group] = []
    for at, (layer, spec) in enumerate(zip(layers, specs)):
        last = groups[-1].specs[-1] if groups else None
        if last is None or (last.form, last.prompt_form, last.angles) != (spec.form, spec.prompt_form, spec.angles) \
                or "layer_input" in spec.given:
            rotary = recogniser.rotaries[spec.angles.path] if spec.angles else None
            groups.append(_Group(rotary, recogniser.takes_pairs))
        groups[-1].add(layer, spec)
    masks = _masks_of(decoder, name, recogniser) if any(spec.states for spec in specs) else ()
    counts = _counts_by_mask(decoder, name, recogniser, masks)
    for layer, spec in zip(layers, specs):
        for weight in spec.weights:
            if weight.transposed:
                _turn(layer, weight)
    for group in groups:
        for layer in group.layers:
            names = tuple(_parameters_of(layer)[2:])
            inner = getattr(layer.__dict__.get("forward"), "__func__", None)
            layer.__dict__["_fftune_layers"] = (inner, names, group, layer is group.layers[0])
            layer.__dict__["forward"] = method_of(layer, _layer_forward)
    inner = getattr(decoder.__dict__.get("forward"), "__func__", None)
    decoder.__dict__["_fftune_layers"] = Layers(groups, layers, inner, decoder, masks, counts)
    decoder.__dict__["forward"] = method_of(decoder, _decoder_forward)
    return (f"{len(layers)} layers of {type(decoder).__name__} by layer in calls of at most "
            f"{MOST_TOKENS} tokens with a static cache")


def _marks_of(masks: tuple[str, ...] | None, mark: Tensor) -> dict:
    """The options by which a decoder hands the mark to its layers."""
    if masks is None:
        return {_MARK_NAME: mark}
    return {"attention_mask": dict.fromkeys(masks, mark) if masks else mark}


def _counts_by_mask(decoder: nn.Module, name: str, recogniser: Recogniser, masks: tuple[str, ...] | None) -> bool:
    """Whether a decoder counts the positions of tokens in its mask, as OPT does, where it is given none: with the mark
    in the place of a mask it needs them."""
    def given(**options) -> list[dict]:
        calls, *_ = calls_of_layers(decoder, name, recogniser.rotaries, filled=True, **options)
        return calls

    marks = _marks_of(masks, torch.empty(_MARK, dtype=torch.int32))
    for positions in ({}, {"position_ids": torch.arange(3).expand(2, -1)}):  # of the tokens of calls_of_layers()
        try:
            if all(map(_are_given_alike, given(**marks, **positions), given())):
                return bool(positions)
        except Unfit:
            continue
    raise Unfit(f"layers: {type(decoder).__name__} reads its mask itself")


def _are_given_alike(marked: dict, plain: dict) -> bool:
    """Whether a layer is given the same tensors, but for masks and the positions that the decoder was given."""
    for name, value in plain.items():
        if "mask" in name or name == "position_ids":
            continue
        ours, theirs = pytree.tree_leaves(marked.get(name)), pytree.tree_leaves(value)
        if len(ours) != len(theirs) or not all(
                torch.equal(a, b) for a, b in zip(ours, theirs) if isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
    return True


def _masks_of(decoder: nn.Module, name: str, recogniser: Recogniser) -> tuple[str, ...] | None:
    """The kinds of layers by which a decoder takes masks that it hands to its layers as they are; None if it hands them
    other arguments that it does not know."""
    kinds = tuple(dict.fromkeys(getattr(decoder.config, "layer_types", None) or ()))
    if {*kinds} == {"hybrid"}:  # each layer is given both masks
        kinds = "full_attention", "linear_attention"
    mark = torch.empty(_MARK, dtype=torch.int32)
    if attentions.makes_causal_mask(decoder):
        calls, *_ = calls_of_layers(decoder, name, recogniser.rotaries, **_marks_of(kinds, mark))
        if not kinds or any(given.get("attention_mask") is not mark for given in calls):
            raise Unfit(f"layers: {type(decoder).__name__} does not hand the mask of a kind of layers to these")
        return kinds
    calls, *_ = calls_of_layers(decoder, name, recogniser.rotaries, **_marks_of(None, mark))
    if any(given.get(_MARK_NAME) is not mark for given in calls):
        raise Unfit(f"layers: {type(decoder).__name__} hands its layers neither masks nor other arguments")
    return None


def restore_layers(module: nn.Module) -> None:
    """Takes back what patch_layers() left beside forwards."""
    found = module.__dict__.pop("_fftune_layers", None)
    if isinstance(found, tuple):
        _, _, group, _ = found
        spec = group.specs[next(i for i, layer in enumerate(group.layers) if layer is module)]
        for weight in spec.weights:
            if weight.transposed:
                _turn(module, weight, back=True)


def _turn(layer: nn.Module, weight: Weight, back: bool = False) -> None:
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


# all decoders of a model

def patch_whole_layers(model: nn.Module, report: PatchReport) -> None:
    decoders = [(name, m) for name, m in model.named_modules()
                if attentions.makes_causal_mask(m) or attentions.makes_mask_of_states(m)]
    if not decoders:
        indexers = sorted({type(m).__name__ for name, m in model.named_modules() if name.rpartition(".")[2] == "indexer"})
        reason = f"{indexers[0]} chooses the keys that a token sees, for which the op has no kernel: nothing tells in " \
                 "advance that sequences stay so short that it chooses all" if indexers else \
                 "no decoder in it makes its mask by transformers' create_causal_mask alone"
        report.left.append(("", f"layers: {reason}"))
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
