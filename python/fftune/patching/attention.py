"""Attention of transformers models: the implementation "fftune", and masks that are left out.

A model that is compiled or captured in a graph cannot look whether its mask is the causal one, so
transformers builds that mask and hands it to attention, which is slow with it. Where a call gives
neither a mask nor positions nor a cache, it is known beforehand. Such a call passes a mask without
elements, which transformers hands through to the attention as it is.
"""
import copy
import inspect
import sys
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from .. import ops
from .._custom import wants_gradient
from .._ops.attention import row_of
from .._library import Error

NAME = "fftune"
SDPA = "fftune_sdpa"  # PyTorch's attention, which patch() chooses where it was that already
# The same, and the module's own attention where it was "eager", with lengths in the place of masks.
LAYERS = "fftune_layers"
EAGER = "fftune_eager"
OURS = (NAME, SDPA, LAYERS)
# Layers of transformers' caches. The last one has states of a mixer beside attention too.
BOTH_LAYERS = ("LinearAttentionAndStaticFullAttentionLayer",)
STATIC_LAYERS = ("StaticLayer", "StaticSlidingWindowLayer", *BOTH_LAYERS)
FLOAT8_LAYERS = ("Float8StaticLayer", "Float8StaticSlidingWindowLayer")  # of fftune.Float8StaticCache
_MARK = (1, 1, 0, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register_attention() -> None:
    """Registers ``attn_implementation="fftune"`` with transformers 4.53 or newer.

    Models loaded with ``from_pretrained(name, attn_implementation="fftune")``, or changed by
    ``model.set_attn_implementation("fftune")``, then run attention by `fftune.ops.attention`, also over a
    static cache, with sinks and soft caps. Calls that it cannot run are PyTorch's: with dropout, with
    padding beside a cache, and over a growing cache. With sinks or a soft cap these run the module's own
    attention.
    """
    if not is_available():
        raise Error("register_attention: this transformers cannot be told of another attention: "
                    "install 4.53 or newer")


def is_available() -> bool:
    """Whether transformers is new enough; registers the implementations."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
    except ImportError:
        return False
    tells_offset = "q_offset" in inspect.signature(sdpa_mask).parameters

    def by_pytorch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                   attention_mask: Tensor | None, **options):
        attention_mask = _without_mark(attention_mask, options)
        if are_lengths(attention_mask):
            attention_mask = _mask_of(attention_mask, query.shape[2], key.shape[2],
                                      _is_causal(module, options))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    def by_module(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, **options):
        if are_lengths(attention_mask):
            attention_mask = _added(_mask_of(attention_mask, query.shape[2], key.shape[2]), query)
        # A mask of the caller's is added as it is, also a boolean one: as 0 and 1.
        own = next(f for kind in type(module).__mro__
                   if (f := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)))
        return own(module, query, key, value, attention_mask, **options)

    def by_fftune(module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                  attention_mask: Tensor | None, **options):
        attention_mask = _without_mark(attention_mask, options)
        causal = _is_causal(module, options)
        if are_lengths(attention_mask):
            if (causal or query.shape[2] == 1) and _serves_cache(query, key, value, **options):
                return _over_cache(query, key, value, attention_mask, _scores_of(options)), None
            attention_mask = _mask_of(attention_mask, query.shape[2], key.shape[2], causal)
        causal = causal and attention_mask is None and query.shape[2] > 1
        if causal and query.shape[2] != key.shape[2] or not _serves(
                query, key, value, attention_mask, **options):
            if _is_pytorchs(options):
                return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
            # PyTorch's would leave out what it does not know.
            if causal:
                attention_mask = torch.ones(
                    query.shape[2], key.shape[2], dtype=torch.bool,
                    device=query.device).tril()[None, None]
            return by_module(module, query, key, value, _added(attention_mask, query), **options)
        if attention_mask is None and not _is_known(query, value) and options.get("s_aux") is None:
            return _heads_apart(query, key, value, causal=causal, **_scores_of(options)), None
        swapped = (t.transpose(1, 2) for t in (query, key, value))
        return ops.attention(*swapped, attention_mask, causal=causal, **_scores_of(options)), None

    def is_causal(function, kv_length: int = 0, local_size: int | None = None, **_) -> bool:
        """Whether it masks nothing but later keys, of kv_length keys from the first on."""
        if function is causal_mask_function:
            return True
        if torch.compiler.is_compiling() or local_size is None or kv_length > local_size:
            return False
        cells = getattr(function, "__closure__", None) or ()
        parts = cells[0].cell_contents if len(cells) == 1 else None
        return (isinstance(parts, tuple) and len(parts) == 2 and parts[1] is causal_mask_function
                and getattr(parts[0], "__qualname__", "").startswith("sliding_window_overlay."))

    def with_lengths(mask):
        """The function that makes lengths where it can, and else that mask."""
        def make(*arguments, **options):
            if not torch.compiler.is_compiling() and _plain_masks.get():
                return mask(*arguments, **options)
            if tells_offset and not arguments and is_causal(options.get("mask_function"), **options):
                lengths = _lengths(**options)
                if lengths is not None:
                    return lengths
            return mask(*arguments, **options)
        return make

    AttentionInterface.register(SDPA, by_pytorch)
    AttentionInterface.register(NAME, by_fftune)
    AttentionMaskInterface.register(SDPA, sdpa_mask)
    AttentionInterface.register(LAYERS, by_pytorch)
    AttentionInterface.register(EAGER, by_module)
    AttentionMaskInterface.register(NAME, with_lengths(sdpa_mask))
    AttentionMaskInterface.register(LAYERS, with_lengths(sdpa_mask))
    AttentionMaskInterface.register(EAGER, with_lengths(eager_mask))
    return True


def format_of(layer) -> str | None:
    """How a layer of a static cache stores keys and values: "" in the model's type, or as float8_e4m3fn with scales of
    a "tensor" or of each "head". None for other layers."""
    kind = type(layer).__name__
    return "" if kind in STATIC_LAYERS else layer.cache_scales if kind in FLOAT8_LAYERS else None


# Whether attention is given masks, as somebody reads them who does not know lengths.
_plain_masks: ContextVar[bool] = ContextVar("fftune_plain_masks", default=False)


@contextmanager
def plain_masks():
    """Within it transformers makes the masks that it would make without fftune."""
    token = _plain_masks.set(True)
    try:
        yield
    finally:
        _plain_masks.reset(token)


def _without_mark(mask: Tensor | None, options: dict) -> Tensor | None:
    """The mask; for the mark of a causal one none, and then attention is the module's own."""
    if mask is None or mask.shape != _MARK:
        return mask
    options.pop("is_causal", None)
    return None


def _is_causal(module: nn.Module, options: dict) -> bool:
    """Whether PyTorch's attention of the module is causal where it is given no mask."""
    own = options.get("is_causal")
    return getattr(module, "is_causal", True) if own is None else own


def _serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options) -> bool:
    """Whether ops.attention takes a call as it is, [batch, heads, tokens, features] each. A copy of
    the keys costs less than attention that PyTorch's kernels do not know."""
    return (_serves_values(query, key, value, **options)
            and (not _is_pytorchs(options) or not _is_known(query, value)
                 or all(row_of(t.transpose(1, 2)) is not None for t in (key, value)))
            and (mask is None or mask.dtype == torch.bool and mask.shape[1] == 1))


def _serves_values(query: Tensor, key: Tensor, value: Tensor, *, dropout: float = 0.0,
                   position_bias: Tensor | None = None, cache=None, **_) -> bool:
    dim = query.shape[-1]
    return (not dropout and position_bias is None and cache is None and query.dtype in _DTYPES
            and key.dtype == value.dtype == query.dtype
            and (query.is_cuda or query.dtype != torch.float16)
            and dim % 2 == 0 and dim <= _widest(query, key, value)
            and value.shape[-1] % 2 == 0 and (_is_known(query, value) or _serves_narrow(query, key, value)))


_MOST_ROWS_OF_MMA_SYNC = 64  # queries of a sequence that wgmma does not serve first


def _serves_narrow(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether values of fewer features than keys are served. On a GPU the kernel of wgmma is faster than PyTorch's
    in prompts (docs/measurements/attention.md); decoding and backward passes have not been timed there."""
    dim, v_dim = query.shape[-1], value.shape[-1]
    if not query.is_cuda:
        return v_dim < dim
    has_backward = wants_gradient(query, key, value)
    return (v_dim < dim <= 256 and dim % 16 == v_dim % 16 == 0 and query.dtype != torch.float32 and not has_backward
            and query.shape[-2] > _MOST_ROWS_OF_MMA_SYNC
            and torch.cuda.get_device_capability(query.device) == (9, 0))


def _is_known(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's fast kernels take values of that many features."""
    return value.shape[-1] == query.shape[-1]


def _widest(*tensors: Tensor) -> int:
    """Features of a head that are faster here than in PyTorch: tensor cores take more of them where
    there is no backward pass."""
    has_backward = wants_gradient(*tensors)
    on_tensor_cores = tensors[0].is_cuda and tensors[0].dtype != torch.float32
    return 512 if on_tensor_cores and not has_backward else 256


def _is_pytorchs(options: dict) -> bool:
    """Whether PyTorch's attention computes it: without sinks and soft cap."""
    return options.get("s_aux") is None and options.get("softcap") is None


def _scores_of(options: dict) -> dict:
    """The options of scores in ops.attention: their factor, a soft cap as Gemma 2 has, and sinks as
    gpt-oss has."""
    return {"scale": options.get("scaling") or 0.0, "softcap": options.get("softcap") or 0.0,
            "sinks": options.get("s_aux")}


# A static cache keeps [batch, kv heads, tokens, features]. The keys of each head of a sequence are
# rows of their own: a sequence with one head for the kernels, with the group's queries. The number
# of its keys that count takes the place of the mask, int32 [batch, 1, 1 or 2, _MOST_HEADS]. There are 2
# where transformers gives no mask for the first tokens of a cache: then a module that is not causal lets
# each of them see all keys.

_MOST_HEADS = 256


def _lengths(*, batch_size: int, q_length: int, kv_length: int, q_offset=0, kv_offset=0,
             attention_mask: Tensor | None = None, device="cpu", allow_is_causal_skip: bool = False,
             local_size: int | None = None, **_) -> Tensor | None:
    """Number of keys of a static cache that count; None for other caches, and if more than the
    order of the tokens masks any."""
    if kv_offset != 0 or not isinstance(q_offset, Tensor) and q_offset + q_length == kv_length:
        return None
    if attention_mask is not None:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if (attention_mask.dim() != 2 or torch.compiler.is_compiling() or capturing
                or not _is_whole(attention_mask, q_offset, q_length)):
            return None
    skips = (allow_is_causal_skip and not torch.compiler.is_compiling()
             and (local_size is None or kv_length < local_size)
             and (attention_mask is None or attention_mask.shape[1] == q_length))
    shape = batch_size, 1, 1 + skips, _MOST_HEADS
    if isinstance(q_offset, Tensor):
        length = (q_offset + q_length).to(device, torch.int32)
        return length.expand(shape).contiguous()
    return torch.full(shape, q_offset + q_length, dtype=torch.int32, device=device)


def are_lengths(mask: Tensor | None) -> bool:
    return (isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.dim() == 4
            and mask.shape[3] == _MOST_HEADS)


def _is_whole(mask: Tensor, past: Tensor | int, tokens: int) -> bool:
    """Whether a mask [batch, keys] masks none of the past keys and those of a call's tokens. Keys behind its
    end are masked."""
    return bool((mask.all() & (past <= mask.shape[1] - tokens)).all())


def masks_nothing_else(mask, past: Tensor, tokens: int) -> bool:
    """Whether a mask, or the masks of the kinds of layers, mask nothing but later keys of a static
    cache, which holds `past` keys before a call of so many tokens."""
    if isinstance(mask, dict):
        # They come from the same padding.
        return any(are_lengths(own) for own in mask.values())
    if mask is None or are_lengths(mask):
        return True
    if mask.dim() != 2 or torch.compiler.is_compiling() or mask.is_cuda \
            and torch.cuda.is_current_stream_capturing():
        return False
    return _is_whole(mask, past, tokens)


def _mask_of(lengths: Tensor, queries: int, keys: int, causal: bool = True) -> Tensor:
    """The boolean mask that they stand for in a module that is causal, or is not."""
    own = lengths[:, :, :1, :1]
    place = own + torch.arange(-queries, 0, device=lengths.device)[:, None]
    mask = torch.arange(keys, device=lengths.device) <= place
    return mask if causal or queries == 1 or lengths.shape[2] == 1 else mask | (own == queries)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A boolean mask as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros_like(mask, dtype=query.dtype)
    return zeros.masked_fill(~mask, torch.finfo(query.dtype).min)


def mask_for_module(lengths: Tensor, hidden: Tensor, keys: int) -> Tensor:
    """The mask that a module adds to the scores of hidden states [batch, tokens, features] and that many keys."""
    return _added(_mask_of(lengths, hidden.shape[1], keys), hidden)


def _serves_cache(query: Tensor, key: Tensor, value: Tensor, **options) -> bool:
    return (_serves_values(query, key, value, **options) and key.shape[1] <= _MOST_HEADS
            and (_heads_together(key, value) or key.is_contiguous() and value.is_contiguous()
                 and options.get("s_aux") is None)
            and not (torch.is_grad_enabled() and query.requires_grad))


def _heads_together(key: Tensor, value: Tensor) -> bool:
    """Whether the heads of a token lie next to each other, as patch(whole_layers=True) has it."""
    return all(t.transpose(1, 2).is_contiguous() for t in (key, value))


def _over_cache(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor,
                scores: dict) -> Tensor:
    """-> [batch, tokens, heads, features]. Sinks are those of the heads of a token, which have to lie
    next to each other."""
    batch, heads, tokens, dim = query.shape
    if _heads_together(key, value):
        return ops.attention(*(t.transpose(1, 2) for t in (query, key, value)),
                             lengths=lengths.view(-1)[:batch], causal=tokens > 1, **scores)
    return _heads_apart(query, key, value, lengths=lengths.view(-1)[:batch * key.shape[1]],
                        causal=tokens > 1, **scores)


def _heads_apart(query: Tensor, key: Tensor, value: Tensor, **rules) -> Tensor:
    """-> [batch, tokens, heads, features], of keys [batch, kv heads, tokens, features] whose heads are
    sequences of their own for the kernels."""
    batch, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = query.reshape(batch * kv_heads, group, tokens, dim).transpose(1, 2)
    keys, values = (t.reshape(batch * kv_heads, -1, 1, t.shape[3]) for t in (key, value))
    y = ops.attention(rows, keys, values, **rules)
    # Some modules take a view of it, and with groups of one head reshape() copies nothing.
    return y.view(batch, kv_heads, tokens, group, -1).transpose(1, 2).reshape(
        batch, tokens, heads, -1).contiguous()


def without_mask(device: torch.device) -> Tensor:
    """The mask that says: causal, and nothing else."""
    return torch.empty(_MARK, dtype=torch.bool, device=device)


# Beside the causal mask: the same within a window, that of an encoder, and that of padding alone.
_KNOWN_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask",
                "create_bidirectional_mask", "create_recurrent_attention_mask"}


def _words_of_forward(module: nn.Module) -> tuple[set[str], set[str]]:
    """The names that its forward uses, and the words in it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    # And those of functions within it, one for the mask of each type of layer say.
    codes = [] if code is None else [code]
    for one in codes:
        codes += [constant for constant in one.co_consts if inspect.iscode(constant)]
    words = {word for one in codes for constant in one.co_consts if isinstance(constant, tuple)
             for word in constant}
    return {name for one in codes for name in one.co_names}, words


def _masks_made(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("create_") and name.endswith(("_mask", "_masks"))}


def makes_causal_mask(module: nn.Module) -> bool:
    """Whether its forward makes the causal mask, within a window too, and nothing but that: no
    overlays, and no chunks."""
    names, words = _words_of_forward(module)
    return "create_causal_mask" in names and _masks_made(names) <= _KNOWN_MASKS and not words & {
        "or_mask_function", "and_mask_function", "block_sequence_ids", "allow_is_causal_skip"}


def makes_mask_of_states(module: nn.Module) -> bool:
    """Whether its forward makes the mask of layers with states, and no other."""
    return _masks_made(_words_of_forward(module)[0]) == {"create_recurrent_attention_mask"}


def uses_interface(module: nn.Module) -> bool:
    """Whether its forward calls the attention of that name, with a mask and without a bias."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return ("ALL_ATTENTION_FUNCTIONS" in names
            and "position_bias" not in inspect.signature(forward).parameters)


def window_of(config) -> int | None:
    """The tokens that a layer with a sliding window sees; None without such layers. Not all types of
    layers with a window say so: one that is set counts for them all."""
    if getattr(config, "use_sliding_window", None) is False \
            and "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    return getattr(config, "sliding_window", None)


# Read by what makes the masks of transformers. Attention is looked at by itself.
_OF_MASKS = {"is_causal", "sliding_window", "use_sliding_window", "attention_chunk_size", "layer_types"}
# Looked at in each call, or read behind the layers.
# And the type that a configuration names, which save_pretrained() writes into it: that of the weights counts.
_OF_CALLS = {"_attn_implementation", "use_cache", "output_attentions", "output_hidden_states",
             "output_router_logits", "return_dict", "use_return_dict", "dtype", "torch_dtype"}


def config_read_by(decoder: nn.Module) -> tuple[tuple[str, object], ...]:
    """The settings of its configuration that a decoder's forwards and masks may read, with their values."""
    names = {*_OF_MASKS, "num_hidden_layers"}
    for kind in {type(module) for module in decoder.modules()}:
        codes = [code] if (code := getattr(inspect.unwrap(kind.forward), "__code__", None)) else []
        for one in codes:
            codes += filter(inspect.iscode, one.co_consts)
            names.update(one.co_names)
    own = vars(decoder.config)
    return tuple((name, copy.deepcopy(own.get(name))) for name in sorted(names - _OF_CALLS)
                 if name in own or name in _OF_MASKS)


def reads_the_same(config, settings: tuple[tuple[str, object], ...]) -> bool:
    """Whether a configuration still has these settings."""
    own = config.__dict__  # PyTorch 2.6 does not trace vars()
    return all(own.get(name) == value for name, value in settings)


def count_causal(model: nn.Module) -> int:
    """The attentions of a model that are causal where they are given no mask."""
    return sum(getattr(module, "is_causal", None) is True for module in model.modules())


def choose(model: nn.Module, name: str) -> bool:
    """Gives the model configurations of its own that name this attention where they said "sdpa".
    Others may share those that it had."""
    return _choose(model, {"sdpa": name})


def choose_lengths(model: nn.Module) -> bool:
    """Likewise, of what masks by lengths where it can, the one that attends as before."""
    return _choose(model, {"sdpa": LAYERS, SDPA: LAYERS, "eager": EAGER})


def _choose(model: nn.Module, names: dict[str, str]) -> bool:
    own: dict = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        before = getattr(config, "_attn_implementation", None)
        if before not in names:
            continue
        if id(config) not in own:
            own[id(config)] = copy.deepcopy(config)
            own[id(config)]._attn_implementation = names[before]
        # The attention before the first choice, then those that were chosen.
        first, *chosen = module.__dict__.get("_fftune_attention", (before,))
        module.__dict__["_fftune_attention"] = first, *chosen, names[before]
        module.config = own[id(config)]
    return bool(own)


def name_the_first(model: nn.Module) -> list[tuple[object, str]]:
    """Gives configurations the attention that they named before choose(); with each, the name that it had now."""
    found: dict = {}
    for module in model.modules():
        first, *chosen = module.__dict__.get("_fftune_attention", (None,))
        config = getattr(module, "config", None)
        name = getattr(config, "_attn_implementation", None)
        if name in chosen and id(config) not in found:
            found[id(config)] = config, name, first
    for config, _, first in found.values():
        config._attn_implementation = first
    return [(config, name) for config, name, _ in found.values()]


def restore(model: nn.Module) -> None:
    """Gives configurations the attention that they named, unless the user chose another one since."""
    for module in model.modules():
        first, *chosen = module.__dict__.pop("_fftune_attention", (None,))
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in chosen:
            config._attn_implementation = first
