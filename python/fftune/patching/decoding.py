"""Ids in, ids out, for a model of patch(model, whole_layers=True): fftune.generate(), and the greedy
steps of transformers' generate().

The first step is the decoder of the model, whose layers one op runs, and the op `head`. The others are
the op `decode` where all layers are alike and what is around them is known, else as the first one. Ids,
lengths and positions advance on the device, so a step is captured in a CUDA graph once and then only
replayed. The host looks at what is finished some steps later than it happens, and waits for no step.
"""
import functools
import inspect
import math
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import ops, reference
from .._checks import expect_module, expect_tensor, int32, named
from .._custom import OPS, call
from .._layer_form import parse
from .._layer_kinds import MOST_KINDS, Kinds
from .._library import Error
from .._memory import free_bytes
from .._ops.head import _draw
from .._ops.packed import packed_word
from .._versions import CACHE_NAMES, as_option, cache_of, pytree, take_cache
from .analytic import PATCHED
from .attention import BOTH_LAYERS, FLOAT8_LAYERS, format_of
from .caches import with_growing_cache
from .graphs import _tensors_of, warn_of_capture
from .layer_mixers import STATE_LAYERS, can_write
from .layer_specs import _is_norm, _norm_of
from .layers import _lies_as_read
from .quantised import fits, is_quantised, numbers_of, packed_of
from .recognise import (Numbers, Unfit, are_plain, expect_alike, expect_methods, has_kernels, has_usual_steps, is_close,
                        reason_of, undoable, view_of, watched)

_LOOKS = 16  # steps from one look at the finished sequences to the next


@dataclass(frozen=True)
class Head:
    """The logits of a model from the hidden states of its decoder."""

    decoder: nn.Module
    product: nn.Module  # nn.Linear, or a layer with a packed weight
    softcap: float
    factor: float  # of the product's result, above 0

    @property
    def weight(self) -> Tensor | ops.PackedWeight:
        return packed_of(self.product) if is_quantised(self.product) else self.product.weight

    @property
    def shape(self) -> tuple[int, int]:
        weight = self.weight
        return tuple(weight.shape) if isinstance(weight, Tensor) else (weight.n, weight.k)

    def __call__(self, hidden: Tensor, **draw) -> Tensor:
        return ops.head(hidden, self.weight, bias=self.product.bias, softcap=self.softcap,
                        **draw)[0]

    def draw_of(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """The arguments of a draw from the product's result without the factor. The best id is the same."""
        if not draw or self.factor == 1.0:
            return draw
        return {**draw, "temperature": draw["temperature"] / self.factor}


@functools.cache
def _outputs() -> type:
    """The kind of outputs that decoders give; what other kinds have beside it is None."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    def missing(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)

    return type("Outputs", (BaseModelOutputWithPast,), {"__getattr__": missing})


class _Given(nn.Module):
    """In the place of a decoder: it gives these hidden states. Its numbers and texts are the decoder's."""

    def __init__(self, hidden: Tensor, decoder: nn.Module):
        super().__init__()
        self.__dict__.update({name: value for name, value in decoder.__dict__.items()
                              if isinstance(value, (bool, int, float, str)) and name not in self.__dict__})
        self.hidden = hidden
        self.inputs: dict = {}

    def forward(self, input_ids=None, *_, **options):
        self.inputs = {name: value for name, value in {**options, "input_ids": input_ids}.items()
                       if isinstance(value, Tensor)}
        return _outputs()(last_hidden_state=self.hidden)


class _Product(nn.Module):
    """The first rows of a product, in float64."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight[:64].double(), None if bias is None else bias[:64].double()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.double(), self.weight, self.bias)


def _factor_of(model: nn.Module, decoder: str, outputs: list[str], weight: Tensor, bias: Tensor | None) -> float:
    """The number by which the model multiplies its product with hidden states, as Granite, Cohere and Falcon-H1 do.
    Whether it does nothing else is for the caller to find."""
    product = _Product(weight, bias)
    hidden = Numbers(6)(1, 7, weight.shape[1], like=weight).double()
    given = _Given(hidden, model._modules[decoder])
    own = view_of(model, {(decoder,): given, **{(name,): product for name in outputs}})
    plain = product(hidden)
    try:
        logits = own(input_ids=torch.zeros(1, 7, dtype=torch.long, device=weight.device), use_cache=False).logits
        factor = float((logits.double() * plain).sum() / plain.square().sum())
    except Exception:  # of a model that takes no such hidden states
        return 1.0
    return 1.0 if abs(factor - 1) < 1e-6 or not 0 < factor < math.inf else factor


@torch.no_grad()
def head_of(model: nn.Module) -> Head:
    """The head of a model, recognised by the logits that the model makes of random hidden states."""
    names = [name for name, module in model.named_children() if "_fftune_layers" in module.__dict__]
    if len(names) != 1:
        raise Unfit("its layers are not those of patch(model, whole_layers=True): see the report")
    decoder, product = model._modules[names[0]], model.get_output_embeddings()
    if not decoder._fftune_layers.mask_as_recognised(decoder):
        raise Unfit("its configuration or its attention was changed since patch(): call it again")
    packed = is_quantised(product)
    if type(product) is not nn.Linear and not packed or watched(model, product):
        raise Unfit("its output embeddings are no linear layer, or have hooks")
    if packed:
        if product._fftune_order is not None:
            raise Unfit("its output embeddings have act-order")
        weight = packed_of(product).dense(numbers_of(product).dtype)
        if not fits(packed_of(product), weight):
            raise Unfit("its output embeddings have scales of another type")
    else:
        weight = product.weight
    if not are_plain(weight, product.bias) or not has_kernels(weight):
        raise Unfit(f"no kernels for output embeddings of {weight.dtype} on {weight.device.type}")
    config = model.config.get_text_config()
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    # No module of the model is called or changed.
    outputs = {(name,): view_of(product, {}) for name, part in model._modules.items() if part is product}

    factor = 1.0 if softcap else _factor_of(model, names[0], [name for name, in outputs], weight, product.bias)

    def ours(hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, product.bias)
        if factor != 1.0:
            return logits * factor
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    numbers = Numbers(5)
    for tokens in (3, 11):
        ids = (numbers(1, tokens).abs() * 1000).long().to(weight.device) % weight.shape[0]
        hidden = numbers(1, tokens, weight.shape[1], like=weight)
        # Logits about as large as the cap, which then changes them.
        size = F.linear(hidden, weight, product.bias).abs().max()
        given = _Given(hidden * ((softcap or 8.0) / size.clamp(min=1e-3)), decoder)
        own = view_of(model, {**outputs, (names[0],): given})
        expect_alike(lambda _: own(input_ids=ids, use_cache=False).logits, ours, given.hidden, sizes=(11,),
                     free=(PATCHED,), subject=type(model).__name__, reason="its logits are not those of a linear "
                     "layer, nor these times a number, nor those with the soft cap of the configuration")
        if given.inputs.keys() != {"input_ids"} or not torch.equal(given.inputs["input_ids"], ids):
            raise Unfit("its decoder is given other inputs than the ids of a call")
    return Head(decoder, product, softcap, factor)


@dataclass(frozen=True)
class Whole:
    """A model as the op `decode` sees it: layers of some kinds, and what is around them."""

    head: Head
    groups: list  # of layers (layers._Group)
    first: tuple  # the kind whose norms are as the last one (kind_of)
    embedding: nn.Module
    norm: nn.Module
    scale: float  # of the embedding

    def layers_of(self, cache, batch: int, places: int) -> list | None:
        """Those of a cache, a list for each group, if the op can read and write them in the first `places`."""
        own = [[cache.layers[spec.index] for spec in group.specs] for group in self.groups]
        weight, sizes = self.embedding.weight, set()
        for group, layers in zip(self.groups, own):
            for kv, spec in zip(layers, group.specs):
                if spec.states:
                    if not can_write(kv, spec, batch, weight) or not kv.is_conv_states_initialized[0]:
                        return None
                    if not spec.has_both:
                        continue
                if not kv.is_initialized or not group.reads(kv, spec, weight):
                    return None
                dtype = torch.float8_e4m3fn if format_of(kv) in ("tensor", "head") else weight.dtype
                size = kv.keys.shape[2]
                sizes.add((size, format_of(kv)))
                # A cache of a window's size is in the order of the tokens until it is full.
                if size < places or spec.window is not None and size > spec.window or not _lies_as_read(kv, spec) \
                        or any(t.dtype != dtype or t.device != weight.device or t.shape[0] != batch
                               for t in (kv.keys, kv.values)):
                    return None
        return None if len(sizes) > 1 or sizes and len(self.groups) > 1 and {*sizes}.pop()[1] else own

    def given(self, layers: list, batch: int) -> tuple[str, list[Tensor], list[Tensor], list[Tensor | None]]:
        """The form of all layers, their weights, their caches and states, and the angles of the kinds that have some:
        those of the first kind, which may be None, and others where these are not the same."""
        kinds, order, weights, states, angles = [self.first], [], [], [], {}
        for group, own in zip(self.groups, layers):
            form, given = group.given(0, own)
            weights += given
            states += group.states(own, batch, self.embedding.weight)
            kind = kind_of(group.specs[0], form)
            if len(self.groups) == 1:
                kinds = [kind]
            elif kind not in kinds:
                kinds.append(kind)
            order += [kinds.index(kind)] * len(own)
            if kind[1] is not None and kind[1] not in angles:
                angles[kind[1]] = self._angles_of(group, own)
        form = Kinds(tuple(form for form, _ in kinds), tuple(order) if len(kinds) > 1 else ()).text()
        if len(angles) < 2:
            return form, weights, states, [*angles.values()] or [None]
        first, *others = (angles.get(own) for _, own in kinds)
        return form, weights, states, [first, *(own for own in others if own is not None)]

    def _angles_of(self, group, own: list) -> Tensor:
        """The angles of the places from 0 on."""
        weight, places = self.embedding.weight, own[0].keys.shape[2]
        x = weight.new_empty(1, places, weight.shape[1])
        rows = torch.arange(places, device=weight.device)[None]
        return group._angles(x, None, rows, group.specs[0])[1].contiguous()


class _Embedded(TorchFunctionMode):
    """Follows ids through an embedding and products with numbers: `factors` of every tensor that is the rows
    of the ids times these, and nothing else, whatever the ids are."""

    def __init__(self, ids: Tensor, weight: Tensor):
        super().__init__()
        self.ids, self.weight = {id(ids): ids}, weight
        self.found: dict[int, tuple[Tensor, list[float]]] = {}
        self.reads_ids = False

    def factors(self, tensor: Tensor) -> list[float] | None:
        return None if self.reads_ids else self.found.get(id(tensor), (None, None))[1]

    def __torch_function__(self, function, types, arguments=(), options=None):
        y = function(*arguments, **(options or {}))
        if getattr(function, "__name__", "") == "__get__" and not isinstance(y, Tensor):
            return y  # a property, which does not depend on values
        given = [t for t in pytree.tree_leaves((arguments, options)) if isinstance(t, Tensor)]
        if any(id(t) in self.ids for t in given):
            if function in (F.embedding, torch.embedding) and any(t is self.weight for t in given):
                self.found[id(y)] = y, []
            elif function in (Tensor.view, Tensor.reshape) and y.shape == arguments[0].shape:
                self.ids[id(y)] = y
            else:
                self.reads_ids = True
            return y
        ours = [t for t in given if id(t) in self.found]
        if not ours:
            return y
        before = self.found[id(ours[0])][1]
        numbers = [value for value in arguments if value is not ours[0]]
        if function in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__) and len(numbers) == 1 and (
                isinstance(numbers[0], (float, int)) or isinstance(numbers[0], Tensor) and not numbers[0].dim()):
            self.found[id(y)] = y, [*before, float(numbers[0])]
        elif y is ours[0] and not function.__name__.endswith("_") or function is F.dropout and torch.equal(y, ours[0]):
            self.found[id(y)] = y, before
        elif function.__name__.endswith("_"):
            self.found.clear()  # it may have been changed in place
        return y


class _Skip(nn.Module):
    """In the place of a layer: it gives what it is given, alone or with None beside it."""

    def __init__(self, layer: nn.Module, gives_pairs: bool):
        super().__init__()
        self.gives_pairs = gives_pairs
        for name in ("attention_type", "layer_type", "layer_idx"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor, *_, **__) -> Tensor:
        self.seen.append(hidden)
        return (hidden, None) if self.gives_pairs else hidden


class _Kept(nn.Module):
    """In the place of a norm: it calls the norm, and keeps what it was given and what it gave."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.__dict__["norm"] = norm

    def forward(self, hidden: Tensor) -> Tensor:
        self.given, self.normed = hidden, self.norm(hidden)
        return self.normed


@torch.no_grad()
def whole_of(head: Head) -> Whole:
    """The model around its head, recognised by what its decoder makes of ids without its layers."""
    decoder = head.decoder
    layers = decoder._fftune_layers
    groups, embedding = layers.groups, decoder.get_input_embeddings()
    if not layers.are_as_recognised(decoder):
        raise Unfit("its layers were changed since patch()")
    if any(spec.given for group in groups for spec in group.specs) or layers.shares:
        raise Unfit("its layers have inputs of their own, factors of queries, or keys of other layers")
    first = _expect_kinds(groups, embedding)
    norms = [child for child in decoder.children() if _is_norm(child)]
    weight = getattr(embedding, "weight", None)
    if getattr(embedding, "max_norm", None) is not None:
        raise Unfit("its embedding has a greatest norm, to which a call scales the rows that it reads")
    if len(norms) != 1 or weight is None or weight.dim() != 2 or not are_plain(weight) \
            or tuple(weight.shape) != head.shape or watched(decoder, embedding, *norms):
        raise Unfit("it has other parts than an embedding, layers and a norm, or hooks")
    norm = _norm_of(norms[0], {})
    w, b = (getattr(norms[0], name, None) for name in ("weight", "bias"))

    def is_like(form) -> bool:
        if w is None or form.get("eps") != norm.eps or (form.get("norm") == "layer") != (norm.kind == "layer"):
            return False
        return norm.kind == "layer" or b is None and norm.convention == form.get("convention")

    first = next((kind for kind in first if is_like(parse(kind[0]))), None)
    if first is None:
        raise Unfit("its last norm is not as those of its layers")
    name, = (name for name, child in decoder._modules.items() if child is layers.own)
    last, = (name for name, child in decoder._modules.items() if child is norms[0])
    skips = {(name, at): _Skip(layer, groups[0].gives_pairs) for at, layer in layers.own._modules.items()}
    kept = _Kept(norms[0])
    view = view_of(decoder, {**skips, (last,): kept})
    view.__dict__.pop("forward", None)
    forward = layers.inner or type(decoder).forward
    known = None
    for count in (1, 5):  # a forward may choose by the number of tokens
        ids = torch.arange(count, device=weight.device)[None] * (weight.shape[0] // 5)
        with _Embedded(ids, weight) as embedded:
            out = forward(view, input_ids=ids, use_cache=False).last_hidden_state
        given = next(iter(skips.values())).seen[-1]
        factors = embedded.factors(given)
        scale = math.prod(factors or (), start=1.0)
        x = (weight[ids].float() * scale).to(weight.dtype)
        known = factors if known is None else known
        if factors is None or factors != known or not torch.equal(x, given):
            raise Unfit("its layers are given something else than an embedding times a factor")
        if kept.given is not given or kept.normed is not out:
            raise Unfit("it computes something between its layers and its last norm, or behind that")
    right = reference.rmsnorm(x, w, norm.eps, norm.convention) if norm.kind == "rms" else \
        reference.layernorm(x, w, torch.zeros_like(w) if b is None else b, norm.eps)
    if not is_close(right, out):
        raise Unfit("its last norm is not known")
    return Whole(head, groups, first, embedding, norms[0], scale)


def kind_of(spec, form: str) -> tuple:
    """The kind of layers of a form: it, and what gives the angles by which they rotate, None without."""
    return form, None if spec.rotation is None else spec.angles


def _expect_kinds(groups: list, embedding: nn.Module) -> list[tuple]:
    """The kinds of layers, if one plan can have all of them: those with caches first."""
    every = [spec for group in groups for spec in group.specs]
    specs = {kind_of(spec, spec.form): spec for spec in every}
    if len(specs) > MOST_KINDS:
        raise Unfit(f"its layers are of {len(specs)} kinds")
    if any(spec.prompt_form or not spec.mixes or parse(spec.form).get("ffn") == "none" for spec in specs.values()):
        raise Unfit("its layers are a mixer or a network alone, or have other steps in prompts")
    if any(p.is_cuda for p in embedding.parameters()):
        if untimed := {parse(form).mixer for form, _ in specs} - {"attention", "conv", "gated-delta-rule"}:
            raise Unfit(f"steps of layers with {', '.join(sorted(untimed))} have not been timed on a GPU")
        if len(specs) > 1 and not any(spec.states for spec in specs.values()) \
                or len({angles for _, angles in specs if angles is not None}) > 1:
            raise Unfit("steps of several kinds of attention have not been timed on a GPU")
    return sorted(specs, key=lambda kind: bool(specs[kind].states))


class _State:
    """The state of some sequences, as the op `decode` has it, and its other arguments."""

    def __init__(self, whole: Whole, layers: list, loop: "Loop", length: int):
        batch, device = loop.ids.shape[0], loop.ids.device
        full = lambda value: torch.full((batch,), value, dtype=torch.int32, device=device)
        self.ids, self.ended = loop.ids[:, 0].int(), loop.done.int()
        self.lengths, self.steps = full(length), full(1)
        self.out = loop.out.int()
        norm, product = whole.norm, whole.head.product
        shift = getattr(norm, "bias", None)
        if shift is None and parse(whole.first[0]).get("norm") == "layer":
            shift = torch.zeros_like(norm.weight)
        form, weights, caches, (angles, *kind_angles) = whole.given(layers, batch)
        draw = [loop.draw.get(name) for name in ("temperature", "seeds", "top_k", "top_p", "min_p")]
        own = whole.head.weight
        head, *packed = (own, None, None, "") if isinstance(own, Tensor) else (
            own.w, own.scale, own.zero, packed_word("decode", own))
        self.arguments = (
            self.ids, self.lengths, self.steps, self.ended, self.out, full(length + loop.count),
            int32("decode", "stop", loop.stop) if loop.stop.numel() else None, whole.embedding.weight,
            angles, None, weights, caches, norm.weight,
            shift, head, product.bias, *draw,
            form, whole.scale, whole.head.softcap, loop.pad, False, 0, None, *packed, None, kind_angles)

    def advance(self) -> None:
        call(OPS.decode, *self.arguments)


class Loop:
    """The steps of some sequences, and their state on the device."""

    def __init__(self, head: Head, cache, ids: Tensor, count: int, stop: tuple[int, ...], pad: int,
                 draw: dict[str, Tensor], whole: Whole | None = None):
        batch, device = ids.shape[0], ids.device
        self.whole, self.state = whole, None
        self.head, self.cache, self.count, self.draw = head, cache, count, head.draw_of(draw)
        # transformers' steps give int64, whatever type a prompt has.
        self.ids = ids.new_zeros(batch, 1, dtype=torch.long)
        self.out = ids.new_full((batch, count), pad, dtype=torch.long)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop, self.pad = torch.tensor(stop, dtype=torch.long, device=device), pad
        # The position of the next token. Without positions some decoders, such as Bamba's, count from 0 in every call.
        takes = "position_ids" in inspect.signature(type(head.decoder).forward).parameters
        self.position = torch.zeros(batch, 1, dtype=torch.long, device=device) if takes else None

    def advance(self, ids: Tensor) -> None:
        """One run of the decoder, and the next id of each sequence."""
        if self.state is not None:
            return self.state.advance()
        count, places = ids.shape[1], {}
        if self.position is not None:
            places["position_ids"] = self.position if count == 1 else \
                self.position + torch.arange(count, device=ids.device)
        hidden = self.head.decoder(input_ids=ids, use_cache=True, **places,
                                   **as_option(self.cache, self.head.decoder)).last_hidden_state[:, -1]
        if self.position is not None:
            self.position += count
        draw = {**self.draw, "steps": self.steps} if self.draw else {}
        chosen = self.head(hidden, **draw).long()
        if self.stop.numel():
            chosen = chosen.masked_fill(self.done, self.pad)
            self.done |= (chosen[:, None] == self.stop).any(-1)
        self.ids.copy_(chosen[:, None])
        self.out.index_copy_(1, self.at, self.ids)
        self.at += 1
        self.steps += 1

    def run(self, ids: Tensor) -> Tensor:
        """The new ids of all sequences, up to the step in which the last one stopped."""
        self.advance(ids)
        if self.whole is not None and self.count > 1:
            # The last id has no key.
            layers = self.whole.layers_of(self.cache, ids.shape[0], ids.shape[1] + self.count - 1)
            self.state = layers and _State(self.whole, layers, self, ids.shape[1])
        if self.count > 1:
            self.advance(self.ids)  # as it is: it makes the plans that a capture has to find
        replay = self._capture() if self.count > 2 else None
        seen, ready = None, None
        for step in range(2, self.count):
            replay()
            if self.stop.numel() and step % _LOOKS == 0:
                if ready is not None:
                    ready.synchronize()
                if seen is not None and seen.all():
                    break
                seen, ready = self._look()
        if self.state is not None:
            self.out = self.state.out.long()
        if not self.stop.numel():
            return self.out
        stopped = (self.out[..., None] == self.stop).any(-1)
        ends = torch.where(stopped.any(-1), stopped.int().argmax(-1) + 1, self.count)
        return self.out[:, :int(ends.max())]

    def _capture(self):
        """A function that runs a step: the replay of a graph where there are any."""
        if not self.ids.is_cuda or self.state is None and _tensors_of(self.cache) is None:
            return lambda: self.advance(self.ids)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.advance(self.ids)
        except Exception as error:  # of a module that runs in the place of the op
            warn_of_capture(error)
            return lambda: self.advance(self.ids)
        return graph.replay

    def _look(self) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """The sequences that are finished now; the host has them when the event is over."""
        done = self.done if self.state is None else self.state.ended
        if not done.is_cuda:
            return done.clone(), None
        seen = torch.empty(done.shape, dtype=done.dtype, pin_memory=True)
        seen.copy_(done, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return seen, event


def _whole_or_none(head: Head) -> Whole | None:
    """None for a model whose steps are its decoder and the head."""
    try:
        return whole_of(head)
    except Exception:
        return None


def _draws(ids: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None,
           min_p: float | None = None, seeds: Tensor | int | None = None) -> dict[str, Tensor]:
    """The arguments of `head` by which each of the sequences draws."""
    if seeds is None:
        seeds = torch.randint(2**62, (ids.shape[0],))
    names = ("temperature", "seeds", "steps", "top_k", "top_p", "min_p")
    draw = dict(zip(names, _draw("generate", ids, temperature, seeds, 0, top_k, top_p, min_p)))
    del draw["steps"]
    for name, value in draw.items():
        if value is None:
            continue
        expect_tensor("generate", name, value)
        if value.shape != ids.shape[:1]:
            raise Error(f"generate: {name} is {list(value.shape)}: give a number, or one for each of "
                        f"{ids.shape[0]} sequences")
    dtypes = dict(temperature=torch.float32, seeds=torch.int64, top_k=torch.int32, top_p=torch.float32,
                  min_p=torch.float32)
    if draw["top_k"] is not None:
        draw["top_k"] = int32("generate", "top_k", draw["top_k"])
    return {name: value.to(ids.device, dtypes[name]) for name, value in draw.items()
            if value is not None}


def _stops(model: nn.Module, stop) -> tuple[int, ...]:
    """The ids that end a sequence: those given, or those of the model."""
    if stop is None:
        stop = getattr(model.generation_config, "eos_token_id", None)
    given = stop if isinstance(stop, (list, tuple)) else () if stop is None else (stop,)
    if not all(isinstance(id, int) and not isinstance(id, bool) and abs(id) < 2**63 for id in given):
        raise Error(f"generate: stop is {named(stop)}: give an id, or a list of ids")
    return tuple(given)


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, max_new_tokens: int, *, stop: int | list[int] | None = None,
             pad: int | None = None, temperature: float | None = None, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None,
             seeds: Tensor | int | None = None, cache=None) -> Tensor:
    """Generates tokens with a model of ``patch(model, whole_layers=True)``: ids go in and ids come out.

    The prompt runs through the decoder and the head. On a GPU the second step is captured in a CUDA graph
    and each further step is one launch of it; with a sliding-window cache the steps run uncaptured.

    Args:
        model: The patched model.
        ids: int32 or int64 [batch, tokens], prompts of one length, without padding.
        max_new_tokens: Most new ids of a sequence.
        stop: An id or ids that end a sequence; the model's eos_token_id by default, [] for none.
        pad: Id behind the end of a sequence; the model's pad_token_id by default, or the first of `stop`.
        temperature, top_k, top_p, min_p: As in `fftune.ops.sample`; without temperature the best id.
        seeds: int64 [batch] or an int, the seed of each sequence; by default from PyTorch's generator.
        cache: An empty `Float8StaticCache` for at least tokens + max_new_tokens - 1 tokens, of the model's
            configuration. By default keys and values are stored in the model's type. The cache has those of all ids
            but the last afterwards; its reset() empties it for another call.

    Returns:
        [batch, tokens + new], the prompts and the new ids.

    Raises:
        fftune.Error: the model has no whole layers, or its head is not recognised.
    """
    expect_module("generate", model)
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2 or (
            not ids.numel()):
        raise Error("generate: ids are no integers [batch, tokens] with a token each: give input_ids")
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or not (
            1 <= max_new_tokens < 2**31):
        raise Error(f"generate: max_new_tokens is {named(max_new_tokens)}: give 1 or more, below 2**31")
    if model.training:
        raise Error("generate: the model is in training: call model.eval()")
    if temperature is None and any(v is not None for v in (top_k, top_p, min_p, seeds)):
        raise Error("generate: top_k, top_p, min_p and seeds are of a draw: give temperature")
    try:
        head = head_of(model)
    except Exception as error:
        raise Error(f"generate: {reason_of(error)}") from None
    stop = _stops(model, stop)
    if pad is None:
        pad = getattr(model.generation_config, "pad_token_id", None)
        pad = pad if pad is not None else stop[0] if stop else 0
    if not isinstance(pad, int) or isinstance(pad, bool) or not 0 <= pad < 2**31:
        raise Error(f"generate: pad is {named(pad)}: give an id")
    from transformers import StaticCache

    ids = ids.to(torch.long)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    least, most = (bound.item() for bound in ids.aminmax())
    if least < 0 or most >= vocabulary:
        raise Error(f"generate: ids are {least} to {most}: the model has 0 to {vocabulary - 1}")
    if cache is None:
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=ids.shape[1] + max_new_tokens)
    else:
        _expect_cache(cache, head, ids, ids.shape[1] + max_new_tokens - 1)
    draw = {} if temperature is None else _draws(ids, temperature, top_k, top_p, min_p, seeds)
    loop = Loop(head, cache, ids, max_new_tokens, stop, pad, draw, _whole_or_none(head))
    return torch.cat((ids, loop.run(ids)), -1)


def _expect_cache(cache, head: Head, ids: Tensor, places: int) -> None:
    """That generate() was given a cache that it can fill."""
    from .float8_cache import Float8StaticCache

    if not isinstance(cache, Float8StaticCache):
        raise Error(f"generate: cache is {named(cache)}: give a Float8StaticCache")
    layers = [layer for layer in cache.layers if type(layer).__name__ in FLOAT8_LAYERS]
    if len(cache.layers) != head.decoder._fftune_layers.count:
        raise Error(f"generate: the cache has {len(cache.layers)} layers, the model has "
                    f"{head.decoder._fftune_layers.count}: make it of the model's configuration")
    if any(int(layer.get_seq_length()) for layer in layers):
        raise Error("generate: the cache is not empty: call its reset(), or give a new one")
    if any(layer.is_initialized and (layer.keys.shape[0] != len(ids) or layer.keys.device != ids.device)
           for layer in layers):
        raise Error(f"generate: the cache is of another number of sequences than {len(ids)}, or on another device: give "
                    "a new one")
    least = min((layer.max_cache_len for layer in layers if not layer.is_sliding), default=places)
    if least < places:
        raise Error(f"generate: the cache has {least} places for {places} tokens: give max_cache_len={places}")


# transformers' generate()

def patch_greedy(model: nn.Module) -> str:
    """Makes generate() run the steps of a greedy search, and of sampling, by Loop."""
    if "custom_generate" not in inspect.signature(type(model).generate).parameters:
        raise Unfit("this transformers takes no function for the steps of generate()")
    expect_methods(model, "generate")
    head_of(model)
    model.__dict__["generate"] = types.MethodType(_generate, model)
    return ("greedy and sampled steps by decode, or by layer and head, with no logits processors but "
            "temperature, top_k, top_p and min_p; drafts are verified by layer")


@undoable
def _generate(self, *arguments, **options):
    if options.get("custom_generate") is None:
        steps = _steps_of(self, arguments, options)
        if steps is not None:
            options["custom_generate"] = steps
    return type(self).generate(self, *arguments, **options)


def _steps_of(model: nn.Module, arguments: tuple, options: dict):
    """A function for the steps of this call of generate() if it is a greedy search, sampling or
    speculative decoding, in one process, with nobody to stream to; else None."""
    from transformers.generation.configuration_utils import GenerationMode

    signature = inspect.signature(type(model).generate)
    others = {name: value for name, value in options.items() if name not in signature.parameters}
    try:
        given = signature.bind(model, *arguments, **options).arguments
        config, _ = model._prepare_generation_config(given.get("generation_config"), **others)
        assistant = given.get("assistant_model")
        mode = config.get_generation_mode(assistant)
    except Exception:  # generate() raises it itself
        return None
    # generate() hands none of these to a function in the place of its own.
    left_out = [given.get("streamer"), given.get("synced_gpus"), options.get("tokenizer"),
                options.get("assistant_tokenizer")]
    if any(v is not None for v in left_out) or not has_usual_steps(model) or (
            torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return _plain_steps
    # Other drafts are made of the model's own layers.
    drafts = assistant is not None or config.prompt_lookup_num_tokens is not None
    own = any(getattr(config, name, None) for name in ("assistant_early_exit", "use_mtp"))
    if mode == GenerationMode.ASSISTED_GENERATION and drafts and not own:
        return _verifying_steps(assistant)
    return None


def _verifying_steps(assistant: nn.Module | None):
    """As transformers' _assisted_decoding(), but the model has a static cache, so the op `layer`
    verifies the few tokens of a draft."""
    def steps(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        cache = _cache_of_drafts(self, generation_config, model_kwargs)
        if cache is not None:
            take_cache(model_kwargs)
            model_kwargs |= as_option(cache, self)
        outputs = type(self)._assisted_decoding(
            self, input_ids, logits_processor, stopping_criteria, generation_config,
            assistant_model=assistant, **model_kwargs)
        return outputs if cache is None else with_growing_cache(outputs, self.config)

    return steps


def _cache_of_drafts(model: nn.Module, config, options: dict):
    """A static cache that takes tokens back, in the place of an empty one of generate(). None if a layer
    would keep the last keys alone."""
    from transformers import StaticCache

    class TakesBack(StaticCache):  # assisted generation refuses StaticCache itself
        def activate_past_recording(self) -> None:
            pass

        def crop(self, tokens: int) -> None:
            for layer in self.layers:
                if layer.is_initialized:  # older releases give what is left
                    layer.cumulative_length.add_(tokens) if tokens <= 0 else \
                        layer.cumulative_length.fill_(tokens)

    decoders = [m for m in model.children() if "_fftune_layers" in m.__dict__]
    if not _is_new(cache_of(options), "DynamicCache") or not all(
            m._fftune_layers.are_as_recognised(m) for m in decoders):
        return None
    # Drafts of a prompt's ids go on behind the last place.
    return _cache_of_all_keys(model, TakesBack, config.max_length + (config.prompt_lookup_num_tokens or 1))


def _is_new(cache, kind: str) -> bool:
    """Whether generate() itself made a cache of this kind, for this call, and it is empty."""
    return type(cache).__name__ == kind and not getattr(cache, "_is_user_defined", False) \
        and not _has_tokens(cache)


def _has_tokens(cache) -> bool:
    """Whether a cache has tokens, which one of states alone does not count."""
    if cache.layers and all(type(layer).__name__ in STATE_LAYERS for layer in cache.layers):
        return cache.has_previous_state()
    return bool(int(cache.get_seq_length()))


def _cache_of_all_keys(model: nn.Module, kind: type, places: int):
    """A new static cache. None if a layer would keep the last keys alone, or a state where drafts take tokens back."""
    from transformers import StaticCache

    cache = kind(config=model.config.get_text_config(), max_cache_len=places)
    known = ("StaticLayer", *((*STATE_LAYERS, *BOTH_LAYERS) if kind is StaticCache else ()))
    return cache if all(type(layer).__name__ in known for layer in cache.layers) else None


def _cache_in_place_of_growing(model: nn.Module, head: Head, batch: int, places: int):
    """A static cache for a call that generate() gave a growing one, which nobody else sees. None if a
    layer would keep the last keys alone, or if the cache would take more than half of the free memory:
    a call that ends early would not have needed it."""
    from transformers import StaticCache

    if not head.decoder._fftune_layers.are_as_recognised(head.decoder):
        return None  # others see the cache
    cache = _cache_of_all_keys(model, StaticCache, places)
    specs = [spec for group in head.decoder._fftune_layers.groups for spec in group.specs]
    tokens = [sum(spec.heads) if spec.is_latent else 2 * math.prod(spec.heads) for spec in specs if spec.attends]
    if cache is None or not specs:
        return None
    size = len(tokens) * max(tokens, default=0) * batch * places
    return cache if 2 * size * model.dtype.itemsize <= free_bytes(model.device) else None


def _plain_steps(self, input_ids: Tensor, logits_processor, stopping_criteria, generation_config,
                 **model_kwargs):
    """As transformers' _sample(), which runs the calls that Loop cannot."""
    draw = _draw_of(logits_processor, generation_config)
    loop = None if draw is None else _loop_of(
        self, input_ids, stopping_criteria, generation_config, model_kwargs, draw)
    if loop is None:
        return type(self)._sample(self, input_ids, logits_processor, stopping_criteria,
                                  generation_config, **model_kwargs)
    return torch.cat((input_ids, loop.run(input_ids)), -1)


def _draw_of(processors, config) -> dict[str, float] | None:
    """The arguments of a draw, none for a greedy search. None for processors that `head` does not
    know, or in another order than it computes them."""
    if not config.do_sample:
        return None if len(processors) else {}
    found: dict[str, float] = {}
    names = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k",
             "TopPLogitsWarper": "top_p", "MinPLogitsWarper": "min_p"}
    order = list(names.values())
    for processor in processors:
        kind = type(processor)
        name = names.get(kind.__name__)
        if name is None or kind.__module__ != "transformers.generation.logits_process" \
                or any(order.index(other) >= order.index(name) for other in found) \
                or getattr(processor, "min_tokens_to_keep", 1) != 1 \
                or getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            return None
        found[name] = getattr(processor, name)
    return {"temperature": 1.0, **found}


def _loop_of(model, ids: Tensor, criteria, config, options: dict, draw: dict) -> Loop | None:
    """The steps of a search, or None if they need more than ids, lengths and a cache of all keys."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    cache, mask = cache_of(options), options.get("attention_mask")
    expected = {*CACHE_NAMES, "attention_mask", "use_cache", "logits_to_keep", "position_ids"}
    kinds = [type(one) for one in criteria]
    if (torch.is_grad_enabled() or model.training or config.return_dict_in_generate
            or config.prefill_chunk_size is not None or options.keys() - expected
            or not options.get("use_cache")
            or kinds.count(MaxLengthCriteria) != 1
            or any(kind not in (MaxLengthCriteria, EosTokenCriteria) for kind in kinds)):
        return None
    # No padding, and the usual positions.
    grows = config.cache_implementation is None and _is_new(cache, "DynamicCache")
    if not grows and not _is_new(cache, "StaticCache") or mask is not None and (
            mask.shape != ids.shape or not bool(mask.all())):
        return None
    positions = options.get("position_ids")
    if positions is not None and (positions.dim() != 2 or positions.shape[1] != ids.shape[1] or bool(
            (positions != torch.arange(ids.shape[1], device=positions.device)).any())):
        return None
    try:
        head = head_of(model)
    except Exception:
        return None
    count = next(one.max_length for one in criteria if type(one) is MaxLengthCriteria) - ids.shape[1]
    stop = [id for one in criteria if type(one) is EosTokenCriteria
            for id in one.eos_token_id.tolist()]
    pad = config._pad_token_tensor
    if count < 1 or stop and pad is None:
        return None
    if grows:
        cache = _cache_in_place_of_growing(model, head, ids.shape[0], ids.shape[1] + count)
        if cache is None:
            return None
    return Loop(head, cache, ids, count, tuple(stop), 0 if pad is None else int(pad),
                _draws(ids, **draw) if draw else {}, _whole_or_none(head))
