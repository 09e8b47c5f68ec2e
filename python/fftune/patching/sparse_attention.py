"""Attention to chosen keys (DSA) of DeepSeek-V3.2, GLM-5 and others: the choice by indexer, attention by mla.

Two modules are replaced. An indexer gives the ids of the keys that each query sees, and writes its keys to a
cache. Where there are no more keys than it chooses, all are, and no score is computed. Else the op `indexer` computes
them. Attention to the chosen keys runs in the absorbed form over the latent cache where that takes fewer products
than expanding the keys. This is so in decoding, and in prompts of several times as many keys as are chosen.

In calls of a few tokens each query is a sequence of its own for both ops, with a list of the keys that its boolean mask
lets through. Such a call reads nothing on the host, and is captured in a graph as it is. With more tokens, the queries
of a sequence have to be its last ones, and see all keys from the first one to their own; the host looks whether the
mask says so. With any other mask, and with gradients in attention, the module's own forward runs.
"""
import copy
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops
from .._versions import CACHE_NAMES, as_option, cache_of
from .analytic import CHOICES, PATCHED
from .quantised import has_codes
from .recognise import (Foreign, Numbers, Options, Unfit, are_plain, expect_methods, expect_no_hooks, expect_plain,
                        has_kernels, has_settings, identify, is_close, kind_of, original, parts_watched, remembered,
                        stand_in, undoable, watched)
from .trial import Trial, replace_forward, tokens_of

_GROWING, _STATIC = "DynamicIndexedLayer", "StaticIndexedLayer"  # of transformers' caches
_DEVICES = ("cpu",)  # where the ops have been timed beside the model's own forward
_SCORES = 1 << 26  # of a call of the op
_FEW = 8  # tokens of a sequence whose queries are sequences of their own
_PROJECTIONS = ("wq_b", "wk", "k_norm", "weights_proj")


# masks

@dataclass(frozen=True)
class Apart:
    """The keys that each query sees, by its row of a boolean mask [batch, queries, keys]: any ones."""

    mask: Tensor

    def pages(self) -> tuple[Tensor, Tensor]:
        """A table of pages of one row, for rows [batch * keys]: the keys that a query sees, in their order, and
        behind them others; and how many they are. int32 [batch * queries, keys] and [batch * queries]."""
        batch, queries, keys = self.mask.shape
        rows = torch.arange(batch * keys, dtype=torch.int32, device=self.mask.device).view(batch, 1, keys)
        places = self.mask.cumsum(-1).sub_(1).masked_fill_(~self.mask, keys)
        table = rows.new_zeros(batch, queries, keys + 1).scatter_(-1, places, rows.expand(self.mask.shape))
        return table[..., :keys].flatten(0, 1).contiguous(), self.mask.sum(-1, dtype=torch.int32).flatten()


@dataclass(frozen=True)
class Visible:
    """The keys that the queries of each sequence see, from `first` [batch] on; as many as `counts` [batch, queries]."""

    first: Tensor
    counts: Tensor

    @property
    def most(self) -> int:
        return int(self.counts.max())

    def end(self) -> int:
        """Behind the last one that any query sees."""
        return int((self.first + self.counts[:, -1]).max())

    def lengths(self) -> Tensor:
        return self.counts[:, -1].int()

    def rows_and_pages(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows [batch, keys, features] as an op takes them: with a table of pages of one row where sequences begin at
        other ones than the first."""
        if not bool(self.first.any()):
            return rows, None
        batch, keys, width = rows.shape
        starts = self.first + torch.arange(batch, device=rows.device) * keys
        return rows.reshape(batch * keys, 1, width), (starts[:, None] + torch.arange(keys, device=rows.device)).int()


def visible_by(mask: Tensor, batch: int) -> Apart | Visible | None:
    """The keys that a mask [batch or 1, queries, keys] lets through; None for one that the ops do not know. A mask is
    boolean, or added to scores."""
    seen, few = mask, mask.shape[1] <= _FEW
    if few and mask.dtype == torch.bool:
        return Apart(mask.expand(batch, -1, -1))
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not bool((seen | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
        if few:
            return Apart(seen.expand(batch, -1, -1))
    counts, first = seen.sum(-1), seen.byte().argmax(-1)[:, :1]
    query, key = (torch.arange(size, device=mask.device) for size in mask.shape[1:])
    end = first + counts
    if (not bool(counts[:, 0].all()) or not torch.equal(counts, counts[:, :1] + query)
            or not torch.equal(seen, (key >= first[..., None]) & (key < end[..., None]))):
        return None
    return Visible(first[:, 0].expand(batch), counts.expand(batch, -1))


# what a call is given

@functools.cache
def _parameters_of(kind: type) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _bound(module: nn.Module, arguments: tuple, options: dict) -> dict:
    return {**dict(zip(_parameters_of(type(module)), arguments)), **options}


def _keys_of(module: nn.Module, given: dict) -> int | None:
    """The keys of a call with the cache that it is given, hidden ones too; None of a cache that is not known."""
    tokens, cache = given["hidden_states"].shape[1], cache_of(given)
    if cache is None:
        return tokens
    if isinstance(cache, _Past):
        return cache.tokens + tokens
    layers = getattr(cache, "layers", ())
    own = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if type(own).__name__ == _STATIC:
        return own.max_cache_len
    if type(own).__name__ != _GROWING:
        return None
    if "q_resid" not in given:
        return own.get_seq_length() + tokens
    return (own.indexer_keys.shape[1] if own.is_indexer_initialized else 0) + tokens  # attention's are there already


_KNOWN = {"hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids",
          "prev_topk_indices", "use_cache", *CACHE_NAMES}


def _is_known_call(module: nn.Module, given: dict) -> bool:
    """Whether the ops run on what a call is given, and its mask is one of all its keys."""
    x, mask = given.get("hidden_states"), given.get("attention_mask")
    return (type(x) is Tensor and type(mask) is Tensor and x.device.type in _DEVICES and has_kernels(x)
            and x.numel() > 0 and not torch.jit.is_tracing() and not torch.is_autocast_enabled(x.device.type)
            and all(value is None for name, value in given.items() if name not in _KNOWN)
            and (mask.dtype == torch.bool or mask.is_floating_point()) and mask.shape[-2] == x.shape[1]
            and mask.shape[0] in (1, x.shape[0]) and mask.shape[-1] == _keys_of(module, given))


@functools.cache
def _rotation_of(kind: type) -> Callable | None:
    """The function by which a class's forward rotates queries and keys; None where there is another number of them."""
    forward = inspect.unwrap(kind.forward)
    names = [name for name in forward.__code__.co_names if name.startswith("apply_rotary_pos_emb")]
    return forward.__globals__.get(names[0]) if len(names) == 1 else None


# the choice of keys

def _rotated(module: nn.Module, x: Tensor, embeddings: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [batch, tokens, heads, features] whose first features are rotated."""
    rope = module.qk_rope_head_dim
    turned, _ = _rotation_of(type(module))(x[..., :rope], x[..., :rope], *embeddings, unsqueeze_dim=2)
    return torch.cat((turned, x[..., rope:]), -1)


def _keys(module: nn.Module, given: dict) -> Tensor:
    """All keys of the indexer [batch, keys, features]; the new ones are added to the cache."""
    k = module.k_norm(module.wk(given["hidden_states"]))[:, :, None]
    k, cache = _rotated(module, k, given["position_embeddings"])[:, :, 0], cache_of(given)
    return k if cache is None else cache.update_indexer(k, module.layer_idx)


def _queries(module: nn.Module, given: dict) -> tuple[Tensor, Tensor]:
    """Queries [batch, tokens, heads, features], and the weights of their heads in float32."""
    q = module.wq_b(given["q_resid"]).unflatten(-1, (module.n_heads, module.head_dim))
    x = given["hidden_states"].to(module.weights_proj.weight.dtype)
    return _rotated(module, q, given["position_embeddings"]), module.weights_proj(x).float()


def _choose(q: Tensor, weights: Tensor, k: Tensor, visible: Apart | Visible, top: int) -> Tensor:
    """-> ids [batch, queries, top]. A query with fewer keys has one several times: a hidden one, or its first."""
    if q.dtype != k.dtype:
        q, k = q.float(), k.float()
    if isinstance(visible, Apart):
        return _choose_apart(q, weights, k, visible, top)
    tokens, first = q.shape[1], visible.first.int()[:, None, None]
    k, pages = visible.rows_and_pages(k[:, :visible.end()])
    part = max(1, _SCORES // (q.shape[0] * (k.shape[1] if pages is None else pages.shape[1])))
    found = []
    for begin in range(0, tokens, part):
        end = min(begin + part, tokens)
        found.append(ops.indexer(q[:, begin:end].contiguous(), weights[:, begin:end].contiguous(), k, top=top,
                                 pages=pages, lengths=visible.lengths() - (tokens - end)))
    ids = torch.cat(found, 1)
    return torch.where(ids < 0, ids[..., :1], ids) + first


def _choose_apart(q: Tensor, weights: Tensor, k: Tensor, visible: Apart, top: int) -> Tensor:
    batch, tokens = q.shape[:2]
    pages, lengths = visible.pages()
    ids = ops.indexer(q.flatten(0, 1)[:, None].contiguous(), weights.flatten(0, 1)[:, None].contiguous(),
                      k.reshape(-1, 1, k.shape[-1]), top=top, pages=pages, lengths=lengths)[:, 0]
    rows = pages.gather(-1, ids.clamp(min=0).long()).view(batch, tokens, top)
    hidden = visible.mask.byte().argmin(-1, keepdim=True).int()  # there is one where keys are fewer than chosen ones
    starts = torch.arange(0, k.shape[0] * k.shape[1], k.shape[1], dtype=torch.int32, device=k.device)
    return torch.where(ids.view(batch, tokens, top) < 0, hidden, rows - starts[:, None, None])


@undoable
def indexer_forward(self, *arguments, **options):
    given = None if torch.compiler.is_compiling() else _bound(self, arguments, options)
    if not (given and _is_known_call(self, given) and self.config._attn_implementation in ("eager", "sdpa")
            and given["attention_mask"].dim() == 3 and not watched(self) and not parts_watched(self)):
        return original(self, *arguments, **options)
    mask, top = given["attention_mask"], self.index_topk
    batch, tokens, total = given["hidden_states"].shape[0], *mask.shape[1:]
    visible = None if total <= top else visible_by(mask, batch)
    if total > top and visible is None:
        return original(self, *arguments, **options)
    with torch.no_grad():
        if isinstance(visible, Apart) or visible is not None and visible.most > top:
            q, weights = _queries(self, given)
            return _choose(q, weights, _keys(self, given), visible, top)
        _keys(self, given)
        ids = torch.arange(min(top, total), dtype=torch.int32, device=mask.device)[None, None]
        if visible is not None:
            ids = (ids + visible.first.int()[:, None, None]).clamp(max=total - 1)
        return ids.expand(batch, tokens, -1)


class _Past:
    """A cache that has keys already, and keeps none: for modules that are tried."""

    def __init__(self, numbers: Numbers, batch: int, tokens: int, widths: tuple[int, ...], like: Tensor):
        self.tokens, self.given = tokens, []
        self.kept = [numbers(batch, tokens, width).to(like) for width in widths]

    def update(self, latent: Tensor, rope: Tensor, *_, **__) -> tuple[Tensor, ...]:
        if any(new.shape[1:] != (1, new.shape[2], own.shape[2]) for own, new in zip(self.kept, (latent, rope))):
            raise Unfit("its cache has keys and values of heads, where mla reads latent ones")
        self.given += [latent, rope]
        return tuple(torch.cat((own[:, None], new), 2) for own, new in zip(self.kept, (latent, rope)))

    def update_indexer(self, k: Tensor, *_, **__) -> Tensor:
        self.given.append(k)
        return torch.cat((self.kept[-1], k), 1)


def _looks_like_indexer(module: nn.Module) -> bool:
    return (all(isinstance(module._modules.get(name), nn.Module) for name in _PROJECTIONS)
            and all(isinstance(getattr(module, name, None), int)
                    for name in ("index_topk", "n_heads", "head_dim", "qk_rope_head_dim", "layer_idx"))
            and hasattr(module, "config"))


def _expect_no_gpu(module: nn.Module) -> None:
    if any(p.device.type not in _DEVICES for p in module.parameters()):
        raise Unfit(f"{type(module).__name__} stays the model's on a GPU: indexer, and mla with lists of keys, have "
                    "not been timed there")


def patch_indexer(module: nn.Module, known: dict, options: Options) -> str | None:
    if not _looks_like_indexer(module):
        return None
    _expect_no_gpu(module)
    expect_plain(module)
    expect_no_hooks(module, *module._modules.values())
    remembered(known, ("indexer", kind_of(module)), lambda: _expect_indexer(module))
    widths = [module._modules[name].in_features for name in ("wk", "wq_b")]

    def given(numbers: Numbers, like: Tensor) -> dict:
        batch, tokens = tokens_of(widths[0], like)
        x, resid = (numbers(batch, tokens, width) for width in widths)
        past = module.index_topk
        embeddings = _embeddings(numbers, tokens, module.qk_rope_head_dim, like)
        return _call_of(module, x, embeddings, _mask(batch, tokens, past),
                        _Past(numbers, batch, past, (module.head_dim,), like), q_resid=resid)

    # The first of equal scores is chosen, where topk takes any.
    replace_forward(module, indexer_forward, (), Trial(given, compares=False), known)
    return f"{type(module).__name__} by indexer"


def _call_of(module: nn.Module, x: Tensor, embeddings: tuple, mask: Tensor, cache, **others) -> dict:
    return dict(hidden_states=x, position_embeddings=embeddings, attention_mask=mask, position_ids=None,
                **as_option(cache, module), **others)


def _embeddings(numbers: Numbers, tokens: int, rope: int, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    pairs = numbers(1, tokens, rope // 2)
    angles = torch.cat((pairs, pairs), -1)
    return tuple(t if like is None else t.to(like) for t in (angles.cos(), angles.sin()))


def _mask(batch: int, tokens: int, past: int) -> Tensor:
    """The causal mask [batch, tokens, keys]."""
    return torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past).expand(batch, -1, -1)


_TOP = 5  # of stand-ins


def _draw(numbers: Numbers, own: nn.Module, width: int, rope: int, kept: tuple[int, ...], added: bool) -> tuple:
    """Hidden states, angles, a mask, and a cache with these widths: behind seven keys, or with none. Some masks have
    padding on the left, and some are added to scores, if `added`."""
    numbers.fill(own)
    past = 7 * (numbers.seed % 2)
    tokens = (9, 2, 11, 1)[numbers.seed % 4]
    mask = _mask(2, tokens, past).clone()
    if numbers.seed % 3 == 2 and past:
        mask[1, :, :2] = False
    if added and numbers.seed % 4 > 1:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    x = numbers(2, tokens, width)
    return x, _embeddings(numbers, tokens, rope), mask, _Past(numbers, 2, past, kept, x) if past else None


def _expect_indexer(module: nn.Module) -> bool:
    """That it chooses as the op does: the module's forward is this one, with the op's rule in torch's operations."""
    subject = type(module).__name__
    if _rotation_of(type(module)) is None:
        raise Unfit(f"{subject} rotates in a way that is not known")
    own = stand_in(module)
    own.index_topk = _TOP
    d, rank = (own._modules[name].in_features for name in ("wk", "wq_b"))

    def draw(numbers: Numbers):
        x, embeddings, mask, past = _draw(numbers, own, d, own.qk_rope_head_dim, (own.head_dim,), True)
        return _call_of(own, x, embeddings, mask, past, q_resid=numbers(*x.shape[:2], rank))

    def chosen(ids: Tensor, given: dict) -> tuple[Tensor, ...]:
        mask = given["attention_mask"]
        seen = mask if mask.dtype == torch.bool else mask == 0
        cache = cache_of(given)
        return (torch.zeros(mask.shape, dtype=torch.bool).scatter(-1, ids.long(), True) & seen,
                *(cache.given[-1:] if cache else ()))

    def ours(relu=torch.relu, weigh=True):
        def compute(given: dict):
            (q, weights), k, mask = _queries(own, given), _keys(own, given), given["attention_mask"]
            scores = relu(torch.matmul(q.float(), k.transpose(-1, -2).float()[:, None]))
            scores = torch.matmul((weights if weigh else torch.ones_like(weights))[..., None, :], scores)[..., 0, :]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            return chosen(scores.topk(min(_TOP, scores.shape[-1])).indices, given)
        return compute

    known = {"indexer": ours(), Foreign("scores below 0"): ours(relu=lambda x: x),
             Foreign("scores without weights"): ours(weigh=False)}
    identify(lambda given: chosen(type(own).forward(own, **given), given), known, draw, subject=subject, least=12,
             sizes=False, free=CHOICES, agrees=_agree, unknown=f"{subject} chooses keys in a way that is not known")
    return True


def _agree(ours: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return len(ours) == len(right) and all(
        torch.equal(a, b) if a.dtype == torch.bool else is_close(a, b, 2e-5) for a, b in zip(ours, right))


# attention to the chosen keys

def _is_cheaper(module: nn.Module, tokens: int, keys: int, top: int) -> bool:
    """Whether the absorbed form takes fewer products, of a head, than the expanded one over all keys."""
    rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
    wide = module.qk_nope_head_dim + module.v_head_dim
    absorbed = tokens * (rank * wide + min(top, keys) * (2 * rank + rope))
    return absorbed < keys * (rank * wide + tokens * (wide + rope))


def _attend(self: nn.Module, given: dict, visible: Apart | Visible) -> tuple[Tensor, Tensor]:
    """The output, and the ids of the keys that were chosen."""
    x, embeddings, cache = given["hidden_states"], given["position_embeddings"], cache_of(given)
    nope, rank = self.qk_nope_head_dim, self.kv_lora_rank
    resid = self.q_a_layernorm(self.q_a_proj(x))
    q = self.q_b_proj(resid).unflatten(-1, (-1, self.qk_head_dim))
    kv = self.kv_a_proj_with_mqa(x)
    latent, k_rope = self.kv_a_layernorm(kv[..., :rank])[:, None], kv[:, None, :, rank:]
    q_rope, k_rope = _rotation_of(type(self))(q[..., nope:].transpose(1, 2), k_rope, *embeddings)
    if cache is not None:
        latent, k_rope = cache.update(latent, k_rope, self.layer_idx)
    mask, ids = given["attention_mask"], given.get("prev_topk_indices")
    if self.indexer is not None:
        ids = self.indexer(x, resid, embeddings, mask[:, 0], given.get("position_ids"),
                           **as_option(cache, self.indexer))
    kv_b = self.kv_b_proj.weight.unflatten(0, (-1, nope + self.v_head_dim))
    absorbed, q_rope = ops.head_linear(q[..., :nope], kv_b[:, :nope], transposed=True), q_rope.transpose(1, 2)
    if isinstance(visible, Apart):
        out = _attend_apart(absorbed, q_rope, latent[:, 0], k_rope[:, 0], ids, visible.mask, self.scaling)
    else:
        end = visible.end()
        rows, pages = visible.rows_and_pages(torch.cat((latent[:, 0, :end], k_rope[:, 0, :end]), -1).to(x.dtype))
        out = ops.mla(absorbed, q_rope.contiguous(), rows, pages=pages, lengths=visible.lengths(),
                      chosen=_list(ids, visible), scale=self.scaling)
    return self.o_proj(ops.head_linear(out, kv_b[:, nope:]).flatten(-2)), ids


def _attend_apart(q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, ids: Tensor, mask: Tensor,
                  scale: float) -> Tensor:
    """Attention to the ids that a mask lets through; the rows of the cache are copied, those of the ids if they are
    fewer."""
    batch, tokens, top = ids.shape
    seen, chosen, pages = mask.gather(-1, ids.long()), ids, None
    if tokens * top < latent.shape[1]:
        index = ids.long().flatten(1)[..., None]
        parts = [part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in (latent, k_rope)]
        rows = torch.cat(parts, -1).view(batch * tokens, top, -1)
        chosen = torch.arange(top, dtype=torch.int32, device=ids.device)
    else:
        rows = torch.cat((latent, k_rope), -1)
        pages = torch.arange(batch, dtype=torch.int32, device=ids.device).repeat_interleave(tokens)[:, None]
    out = ops.mla(*(q.flatten(0, 1)[:, None].contiguous() for q in (q_latent, q_rope)), rows.to(q_latent.dtype),
                  pages=pages, chosen=torch.where(seen, chosen, -1).int().flatten(0, 1)[:, None], scale=scale)
    return out.view(batch, tokens, *out.shape[2:])


def _list(ids: Tensor, visible: Visible) -> Tensor | None:
    """The keys of each query by their places behind the first one, each once; None where all are chosen."""
    top, counts = ids.shape[-1], visible.counts
    if visible.most <= top:
        return None
    own = ids - visible.first[:, None, None]
    # Where all are chosen, the others among the ids are hidden ones, or there several times.
    return torch.where((counts <= top)[..., None], torch.arange(top, device=ids.device), own).int().contiguous()


@undoable
def attention_forward(self, *arguments, **options):
    given = None if torch.compiler.is_compiling() or torch.is_grad_enabled() else _bound(self, arguments, options)
    visible = _visible_in(self, given) if given else None
    if visible is None:
        return original(self, *arguments, **options)
    results, = self._fftune
    y, ids = _attend(self, given, visible)
    return (y, None, ids)[:results]


def _visible_in(self: nn.Module, given: dict) -> Apart | Visible | None:
    """The keys that the queries of a call see, if mla runs its attention."""
    if not _is_known_call(self, given):
        return None
    x, mask, prior = (given.get(name) for name in ("hidden_states", "attention_mask", "prev_topk_indices"))
    layer = self.kv_b_proj
    if (self.config._attn_implementation != "sdpa" or self.training and self.attention_dropout
            or not has_settings(self) or type(layer) is not nn.Linear or watched(layer)
            or layer.weight.dtype != x.dtype or not are_plain(layer.weight) or layer.weight.device != x.device
            or mask.dim() != 4 or mask.shape[1] != 1 or self.indexer is None and type(prior) is not Tensor):
        return None
    top = prior.shape[-1] if self.indexer is None else self.indexer.index_topk
    if not _is_cheaper(self, x.shape[1], mask.shape[-1], top):
        return None
    return visible_by(mask[:, 0], x.shape[0])


_PARTS_OF_ATTENTION = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj",
                       "o_proj")
_SIZES_OF_ATTENTION = ("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_lora_rank", "layer_idx")


def patch_sparse_attention(module: nn.Module, known: dict, options: Options) -> str | None:
    if not (hasattr(module, "indexer") and all(isinstance(getattr(module, name, None), int)
                                               for name in _SIZES_OF_ATTENTION)
            and all(name in module._modules for name in _PARTS_OF_ATTENTION)):
        return None
    subject, layer = type(module).__name__, module.kv_b_proj
    _expect_no_gpu(module)
    expect_plain(module)
    expect_methods(module, "forward", "expand_kv")
    if type(layer) is not nn.Linear or has_codes(layer) or layer.bias is not None or "forward" in layer.__dict__:
        raise Unfit(f"{subject} has a kv_b_proj that is no plain Linear")
    if module.q_a_proj is None:
        raise Unfit(f"{subject} has no latent of queries")
    expect_no_hooks(layer)
    results = remembered(known, ("attention to chosen keys", kind_of(module)), lambda: _expect_attention(module))
    width, rope = module.kv_a_proj_with_mqa.in_features, module.qk_rope_head_dim

    def given(numbers: Numbers, like: Tensor) -> dict:
        (batch, tokens), past = tokens_of(width, like), 3
        x = numbers(batch, tokens, width)
        return _call_of(module, x, _embeddings(numbers, tokens, rope, like), _mask(batch, tokens, past)[:, None],
                        _Past(numbers, batch, past, _widths(module), like), **_prior(module, batch, tokens, past))

    replace_forward(module, attention_forward, (results,), Trial(given), known)
    return f"attention of {subject} to chosen keys by mla, where that takes fewer products"


def _widths(module: nn.Module) -> tuple[int, ...]:
    return (module.kv_lora_rank, module.qk_rope_head_dim,
            *(() if module.indexer is None else (module.indexer.head_dim,)))


def _prior(module: nn.Module, batch: int, tokens: int, past: int) -> dict:
    """The keys of a layer that takes those of another one."""
    if module.indexer is not None:
        return {}
    ids = torch.arange(past + tokens, dtype=torch.int32)[:_TOP]
    return dict(prev_topk_indices=ids.expand(batch, tokens, -1))


def _expect_attention(module: nn.Module) -> int:
    """The number of results of a module that attends to chosen keys as mla does."""
    subject, indexer = type(module).__name__, module.indexer
    if _rotation_of(type(module)) is None:
        raise Unfit(f"{subject} rotates in a way that is not known")
    if indexer is not None and not _looks_like_indexer(indexer):
        raise Unfit(f"{subject} has an indexer that is not known")
    own = stand_in(module, _smaller(module))
    if own.indexer is not None:
        own.indexer.index_topk = _TOP
    for one in own.modules():
        if hasattr(one, "config"):
            one.config = copy.deepcopy(one.config)
            one.config._attn_implementation = "sdpa"
    width, found = own.kv_a_proj_with_mqa.in_features, []

    def draw(numbers: Numbers):
        x, embeddings, mask, past = _draw(numbers, own, width, own.qk_rope_head_dim, _widths(own), False)
        return _call_of(own, x, embeddings, mask[:, None], past,
                        **_prior(own, *x.shape[:2], past.tokens if past else 0))

    def kept(y: Tensor, given: dict) -> tuple[Tensor, ...]:
        cache = cache_of(given)
        return y, *(cache.given[-len(_widths(own)):] if cache else ())

    def theirs(given: dict):
        results = type(own).forward(own, **given)
        found.append(len(results))
        return kept(results[0], given)

    def ours(scale: float = 1.0, chooses: bool = True):
        def compute(given: dict):
            x, mask = given["hidden_states"], given["attention_mask"]
            scaling, own.scaling = own.scaling, own.scaling * scale
            top = own.indexer.index_topk if own.indexer is not None else 0
            try:
                if not chooses and own.indexer is not None:
                    own.indexer.index_topk = mask.shape[-1]
                return kept(_attend(own, given, visible_by(mask[:, 0], x.shape[0]))[0], given)
            finally:
                own.scaling = scaling
                if own.indexer is not None:
                    own.indexer.index_topk = top
        return compute

    known = {"mla": ours(), Foreign("attention with another scale"): ours(scale=0.5)}
    if own.indexer is not None:
        known[Foreign("attention to all keys")] = ours(chooses=False)
    identify(theirs, known, draw, subject=subject, least=12, sizes=False, free=(PATCHED, *CHOICES), agrees=_agree,
             unknown=f"{subject} attends, or keeps keys in its cache, in a way that is not known")
    return found[0]


def _smaller(module: nn.Module) -> dict[int, int]:
    """Two heads in a stand-in of a large module, where no other size is one that they change."""
    nope, rope, v = module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim
    heads = module.kv_b_proj.out_features // (nope + v)
    sizes = {heads * each: 2 * each for each in (nope + v, nope + rope, v)}
    others = {nope, rope, v, module.kv_lora_rank, module.q_a_proj.out_features, module.q_a_proj.in_features}
    if module.indexer is not None:
        others |= {module.indexer.head_dim, module.indexer.n_heads * module.indexer.head_dim, module.indexer.n_heads}
    return {} if heads <= 2 or others & sizes.keys() else sizes
