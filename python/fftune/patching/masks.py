"""Causal masks that need not be made."""
import copy
import inspect

import torch
from torch import Tensor, nn

from .._versions import cache_of
from . import attention as attentions
from .analytic import INTEGERS, PATCHED, Trace
from .mlps import required_arguments, takes_one_argument
from .recognise import (Numbers, Options, PatchReport, Unfit, expect_alike, expect_pieces, has_hooks, on_one_thread, original,
                        reason_of, set_forward, stand_in, trying, undoable)


def patch_masks(model: nn.Module, report: PatchReport, options: Options) -> None:
    """Leaves the causal mask out where nothing but the order of the tokens masks any."""
    decoders = [(name, m) for name, m in model.named_modules()
                if attentions.makes_causal_mask(m)
                and getattr(m.config, "_attn_implementation", None) == "sdpa"]
    if not decoders:
        return
    name, first = decoders[0]
    try:
        if not attentions.is_available():
            raise Unfit("attention: this transformers cannot be told of another one")
        if any(not attentions.uses_interface(m) for _, decoder in decoders
               for m in decoder.modules() if hasattr(m, "is_causal")):
            raise Unfit(f"the attention of {type(first).__name__} is not known")
        if any("forward" in decoder.__dict__ for _, decoder in decoders):
            raise Unfit(f"the forward of {type(first).__name__} was replaced already")
        attentions.choose(model, attentions.NAME if options.attention else attentions.SDPA)
        with on_one_thread():
            for _, decoder in decoders:
                _expect_mask_to_be_left_out(decoder)
        for _, decoder in decoders:
            decoder.__dict__["_fftune_readers"] = _Readers(decoder)
        for name, decoder in decoders:
            set_forward(decoder, _decoder_forward, attentions.config_read_by(decoder))
            report.replaced.append((name, f"{type(decoder).__name__} without the causal mask"))
            if options.attention:
                words = f"attention of {type(decoder).__name__} by attention"
                report.replaced.append((name, words))
    except Exception as error:
        attentions.restore(model)
        report.left.append((name, reason_of(error)))


class _Readers:
    """The attentions of a decoder, and all that stands between, as patch() found them: they know the mask that
    stands for a causal one. A module that came later, or a user's hook, has to be given what the model makes."""

    def __init__(self, decoder: nn.Module):
        paths = [name for name, m in decoder.named_modules(remove_duplicate=False) if hasattr(m, "is_causal")]
        names = {".".join(path.split(".")[:count]) for path in paths for count in range(1, 1 + path.count(".") + 1)}
        self.modules = [decoder.get_submodule(name) for name in names]
        for module in self.modules:
            place = getattr(inspect.unwrap(type(module).forward), "__module__", None) or ""
            if place.partition(".")[0] not in ("torch", "transformers"):
                raise Unfit(f"{type(module).__name__} may read the mask: it is no module of transformers")
        self.places = [(parent, name, child) for parent in (decoder, *self.modules)
                       for name, child in parent._modules.items() if child in self.modules]

    def are_known(self) -> bool:
        return all(parent._modules.get(name) is child for parent, name, child in self.places) \
            and not any(map(has_hooks, self.modules))


_MOST_PLACES = 1 << 14  # of an embedding of positions; those of words are not read


def _expect_mask_to_be_left_out(decoder: nn.Module) -> None:
    """That it computes the same from one layer without the mask as with it."""
    name, layers = next(((name, child) for name, child in decoder.named_children()
                         if isinstance(child, nn.ModuleList) and len(child)), (None, None))
    if layers is None:
        raise Unfit(f"{type(decoder).__name__} has no list of layers")
    if decoder.get_input_embeddings().weight.dim() != 2:
        raise Unfit(f"{type(decoder).__name__} has no embedding that is known")
    parts = _passing(layers[0])
    alone = {own: part for own, part in parts.items() if takes_one_argument(layers[0]._modules[own])}
    for passing in (parts, alone) if alone != parts else (parts,):
        try:
            return _compare(decoder, name, stand_in(layers[0], parts=passing))
        except Unfit:  # its parts are given, or give, something else than hidden states
            pass
    _compare(decoder, name, stand_in(layers[0]))


_LARGE = 1 << 22  # parameters


class _Passing(nn.Module):
    """Stands for a part that takes hidden states alone, and so no mask."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _passing(layer: nn.Module) -> dict[str, nn.Module]:
    """Stand-ins of MLPs and experts, which would take seconds and gigabytes to fill."""
    return {name: _Passing() for name, child in layer.named_children()
            if sum(p.numel() for p in child.parameters()) > _LARGE and required_arguments(child) == 1
            and not any(hasattr(m, "is_causal") for m in child.modules())}


def _compare(decoder: nn.Module, name: str, layer: nn.Module) -> None:
    """A decoder of that one layer, with the mask and without."""
    width = decoder.get_input_embeddings().weight.shape[1]
    one = nn.ModuleList([layer])
    nothing = {child: nn.Identity() for child, other in decoder.named_children()
               if isinstance(other, nn.Embedding) and other.num_embeddings > _MOST_PLACES}
    own = stand_in(decoder, parts={name: one, **nothing})
    own.config = copy.deepcopy(decoder.config)
    own.config.num_hidden_layers = 1
    numbers = Numbers(0)
    numbers.fill(own)
    x = numbers(2, 3, width)
    subject = type(decoder).__name__

    def run(mask: Tensor | None):
        return lambda x: own(inputs_embeds=x, use_cache=False, attention_mask=mask)[0]

    theirs, ours = run(None), run(attentions.without_mask(x.device))
    with torch.no_grad(), trying(f"{subject} reads its mask or token ids itself"):
        expect_alike(theirs, ours, x, subject=subject, free=(INTEGERS, PATCHED),
                     reason=f"{subject} uses its mask in a way that is not known")
        with Trace((INTEGERS, PATCHED)) as trace:
            ours(x)
        expect_pieces(trace, lambda: theirs(x), subject)


def _makes_all_masks() -> bool:
    """Whether transformers cannot look if a mask is the causal one, which attention then needs not be given."""
    return torch.compiler.is_compiling() or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@undoable
def _decoder_forward(self, input_ids: Tensor | None = None, *arguments, **options):
    given = input_ids if input_ids is not None else options.get("inputs_embeds")
    window = attentions.window_of(self.config)
    plain = (not arguments and given is not None
             and all(options.get(name) is None for name in ("attention_mask", "position_ids"))
             and cache_of(options) is None
             and options.get("is_causal") in (None, True)
             and attentions.reads_the_same(self.config, self._fftune)
             and self.config._attn_implementation in attentions.OURS
             and (window is None or given.shape[1] <= window)
             and _makes_all_masks() and self._fftune_readers.are_known())
    if plain:
        options["attention_mask"] = attentions.without_mask(given.device)
    return original(self, input_ids, *arguments, **options)
