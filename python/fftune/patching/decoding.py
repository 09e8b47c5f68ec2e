"""Ids in, ids out, for a model of patch(model, whole_layers=True): fftune.generate(), and the greedy
steps of transformers' generate().

A step is the decoder of the model, whose layers one op runs, and the op `head`. Ids, lengths and
positions advance on the device, so a step is captured in a CUDA graph once and then only replayed. The
host looks at what is finished some steps later than it happens, and waits for no step.
"""
import inspect
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .._library import Error
from .graphs import _tensors_of
from .recognise import Unfit, are_plain, has_kernels, is_close, reason_of, undoable, view_of, watched

_LOOKS = 16  # steps from one look at the finished sequences to the next


@dataclass(frozen=True)
class Head:
    """The logits of a model from the hidden states of its decoder."""

    decoder: nn.Module
    product: nn.Linear
    softcap: float

    def __call__(self, hidden: Tensor, **draw) -> Tensor:
        return ops.head(hidden, self.product.weight, bias=self.product.bias, softcap=self.softcap,
                        **draw)[0]


class _Given(nn.Module):
    """In the place of a decoder: it gives these hidden states."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_, **__):
        from transformers.modeling_outputs import BaseModelOutputWithPast

        output = BaseModelOutputWithPast(last_hidden_state=self.hidden)
        for name in ("router_logits", "cross_attentions"):  # of other kinds of outputs
            object.__setattr__(output, name, None)
        return output


@torch.no_grad()
def head_of(model: nn.Module) -> Head:
    """The head of a model, recognised by the logits that the model makes of random hidden states."""
    names = [name for name, module in model.named_children() if "_fftune_layers" in module.__dict__]
    if len(names) != 1:
        raise Unfit("its layers are not those of patch(model, whole_layers=True): see the report")
    decoder, product = model._modules[names[0]], model.get_output_embeddings()
    if type(product) is not nn.Linear or watched(model, product):
        raise Unfit("its output embeddings are no linear layer, or have hooks")
    weight = product.weight
    if not are_plain(weight, product.bias) or not has_kernels(weight):
        raise Unfit(f"no kernels for output embeddings of {weight.dtype} on {weight.device.type}")
    config = model.config.get_text_config()
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    ids = torch.zeros(1, 3, dtype=torch.long, device=weight.device)
    for _ in range(2):
        hidden = torch.randn(1, 3, weight.shape[1], dtype=weight.dtype, device=weight.device)
        # Logits about as large as the cap, which then changes them.
        size = F.linear(hidden, weight, product.bias).abs().max()
        hidden = hidden * ((softcap or 8.0) / size.clamp(min=1e-3))
        right = F.linear(hidden, weight, product.bias)
        if softcap:
            right = torch.tanh(right / softcap) * softcap
        # No module of the model is called or changed.
        outputs = {(name,): view_of(product, {}) for name, part in model._modules.items()
                   if part is product}
        own = view_of(model, {**outputs, (names[0],): _Given(hidden)})
        logits = own(input_ids=ids, use_cache=False).logits
        if logits.shape != right.shape or not is_close(right, logits):
            raise Unfit("its logits are not those of a linear layer, nor of one with the soft cap of "
                        "the configuration")
    return Head(decoder, product, softcap)


class Loop:
    """The steps of some sequences, and their state on the device."""

    def __init__(self, head: Head, cache, ids: Tensor, count: int, stop: tuple[int, ...], pad: int,
                 draw: dict[str, Tensor]):
        batch, device = ids.shape[0], ids.device
        self.head, self.cache, self.count, self.draw = head, cache, count, draw
        self.ids = ids.new_zeros(batch, 1)
        self.out = ids.new_full((batch, count), pad)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.steps = torch.zeros(batch, dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.stop, self.pad = torch.tensor(stop, dtype=torch.long, device=device), pad

    def advance(self, ids: Tensor) -> None:
        """One run of the decoder, and the next id of each sequence."""
        hidden = self.head.decoder(input_ids=ids, past_key_values=self.cache,
                                   use_cache=True).last_hidden_state[:, -1]
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
        if not self.stop.numel():
            return self.out
        stopped = (self.out[..., None] == self.stop).any(-1)
        ends = torch.where(stopped.any(-1), stopped.int().argmax(-1) + 1, self.count)
        return self.out[:, :int(ends.max())]

    def _capture(self):
        """A function that runs a step: the replay of a graph where there are any."""
        if not self.ids.is_cuda or _tensors_of(self.cache) is None:
            return lambda: self.advance(self.ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.advance(self.ids)
        return graph.replay

    def _look(self) -> tuple[Tensor, "torch.cuda.Event | None"]:
        """The sequences that are finished now; the host has them when the event is over."""
        if not self.done.is_cuda:
            return self.done.clone(), None
        seen = torch.empty(self.done.shape, dtype=torch.bool, pin_memory=True)
        seen.copy_(self.done, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return seen, event


def _stops(model: nn.Module, stop) -> tuple[int, ...]:
    """The ids that end a sequence: those given, or those of the model."""
    if stop is None:
        stop = getattr(model.generation_config, "eos_token_id", None)
    stop = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in stop):
        raise Error(f"generate: stop is {stop!r}: give an id, or a list of ids")
    return stop


@torch.no_grad()
def generate(model: nn.Module, ids: Tensor, max_new_tokens: int, *, stop: int | list[int] | None = None,
             pad: int | None = None, temperature: float | None = None, top_k: int | None = None,
             top_p: float | None = None, min_p: float | None = None,
             seeds: Tensor | int | None = None) -> Tensor:
    """Continues the sequences `ids` [batch, tokens] with up to `max_new_tokens` new ids: -> [batch,
    tokens + new]. The model is one of patch(model, whole_layers=True), and sequences have no padding.

    The next id is the best one, or with `temperature` a sample, as `ops.sample` draws it with `top_k`,
    `top_p` and `min_p`. Sequence i has the seed `seeds[i]`; by default seeds come from PyTorch's
    generator. A sequence ends with an id of `stop`, by default the model's eos_token_id; `stop=[]`: no
    id ends it. Behind its end there is `pad`, by default the model's pad_token_id, or its first id of
    `stop`.

    On a GPU, the second step is captured in a CUDA graph, and each further step is one launch of it;
    with a cache of a window's size, steps run as they are.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise Error("generate: ids are no integers [batch, tokens] with a token each: give input_ids")
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise Error(f"generate: max_new_tokens is {max_new_tokens!r}: give 1 or more")
    if model.training:
        raise Error("generate: the model is in training: call model.eval()")
    if temperature is None and any(v is not None for v in (top_k, top_p, min_p, seeds)):
        raise Error("generate: top_k, top_p, min_p and seeds are of a draw: give temperature")
    stop = _stops(model, stop)
    if pad is None:
        pad = getattr(model.generation_config, "pad_token_id", None)
        pad = pad if pad is not None else stop[0] if stop else 0
    try:
        head = head_of(model)
    except Exception as error:
        raise Error(f"generate: {reason_of(error)}") from None
    from transformers import StaticCache

    ids = ids.to(torch.long)
    cache = StaticCache(config=model.config.get_text_config(),
                        max_cache_len=ids.shape[1] + max_new_tokens)
    draw = {}
    if temperature is not None:
        of = lambda value, dtype: torch.full((ids.shape[0],), value, dtype=dtype, device=ids.device)
        if seeds is None:
            seeds = torch.randint(2**62, (ids.shape[0],))
        draw = {"temperature": of(temperature, torch.float32),
                "seeds": of(seeds, torch.int64) if isinstance(seeds, int) else
                seeds.to(ids.device, torch.int64)}
        if any(v is not None for v in (top_k, top_p, min_p)):
            draw |= {"top_k": of(top_k or 0, torch.int32),
                     "top_p": of(1.0 if top_p is None else top_p, torch.float32),
                     "min_p": of(min_p or 0.0, torch.float32)}
    loop = Loop(head, cache, ids, max_new_tokens, stop, pad, draw)
    return torch.cat((ids, loop.run(ids)), -1)


# transformers' generate()

def patch_greedy(model: nn.Module) -> str:
    """Makes generate() run the steps of a greedy search by Loop."""
    if "custom_generate" not in inspect.signature(type(model).generate).parameters:
        raise Unfit("this transformers takes no function for the steps of generate()")
    head_of(model)
    model.__dict__["generate"] = types.MethodType(_generate, model)
    return "greedy steps by layer and head, with a static cache and no logits processors"


@undoable
def _generate(self, *arguments, **options):
    if options.get("custom_generate") is None and _is_greedy(self, arguments, options):
        options["custom_generate"] = _greedy_steps
    return type(self).generate(self, *arguments, **options)


def _is_greedy(model: nn.Module, arguments: tuple, options: dict) -> bool:
    """Whether this call of generate() is a greedy search of one process, with nobody to stream to."""
    from transformers.generation.configuration_utils import GenerationMode

    signature = inspect.signature(type(model).generate)
    others = {name: value for name, value in options.items() if name not in signature.parameters}
    try:
        given = signature.bind(model, *arguments, **options).arguments
        config, _ = model._prepare_generation_config(given.get("generation_config"), **others)
        mode = config.get_generation_mode(given.get("assistant_model"))
    except Exception:  # generate() raises it itself
        return False
    # generate() hands none of these to a function in the place of its own.
    left_out = [given.get("streamer"), given.get("synced_gpus"), options.get("tokenizer")]
    return (mode is GenerationMode.GREEDY_SEARCH and not any(v is not None for v in left_out)
            and not (torch.distributed.is_available() and torch.distributed.is_initialized()))


def _greedy_steps(self, input_ids: Tensor, logits_processor, stopping_criteria, generation_config,
                  **model_kwargs):
    """As transformers' _sample(), which runs the calls that Loop cannot."""
    loop = None if len(logits_processor) else _loop_of(
        self, input_ids, stopping_criteria, generation_config, model_kwargs)
    if loop is None:
        return type(self)._sample(self, input_ids, logits_processor, stopping_criteria,
                                  generation_config, **model_kwargs)
    return torch.cat((input_ids, loop.run(input_ids)), -1)


def _loop_of(model, ids: Tensor, criteria, config, options: dict) -> Loop | None:
    """The steps of a greedy search, or None if they need more than ids, lengths and a static cache."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    cache, mask = options.get("past_key_values"), options.get("attention_mask")
    expected = {"past_key_values", "attention_mask", "use_cache", "logits_to_keep", "position_ids"}
    kinds = [type(one) for one in criteria]
    if (torch.is_grad_enabled() or model.training or config.return_dict_in_generate
            or config.prefill_chunk_size is not None or options.keys() - expected
            or not options.get("use_cache")
            or kinds.count(MaxLengthCriteria) != 1
            or any(kind not in (MaxLengthCriteria, EosTokenCriteria) for kind in kinds)):
        return None
    # The cache of this call, and empty; no padding, and the usual positions.
    if type(cache).__name__ != "StaticCache" or getattr(cache, "_is_user_defined", False) \
            or int(cache.get_seq_length()) or mask is not None and not bool(mask.all()):
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
    return Loop(head, cache, ids, count, tuple(stop), 0 if pad is None else int(pad), {})
