"""generate(): the blocking of repeated n-grams by ngram-block; and generate_batch(), which runs by the attention that
the model had."""
import types

import torch
from torch import Tensor, nn

from .. import ops
from . import attention as attentions
from .recognise import PatchReport, expect_methods, undoable


def patch_generation(model: nn.Module, report: PatchReport) -> None:
    if not hasattr(type(model), "_get_logits_processor"):
        return
    expect_methods(model, "_get_logits_processor")
    model.__dict__["_get_logits_processor"] = types.MethodType(_logits_processor, model)
    report.replaced.append(("generate", "no_repeat_ngram_size by ngram-block"))
    if hasattr(type(model), "init_continuous_batching"):
        expect_methods(model, "init_continuous_batching")
        model.__dict__["init_continuous_batching"] = types.MethodType(_init_continuous_batching, model)


@undoable
def _logits_processor(self, *arguments, **options):
    from transformers import NoRepeatNGramLogitsProcessor

    processors = type(self)._get_logits_processor(self, *arguments, **options)
    for i, processor in enumerate(processors):
        if type(processor) is NoRepeatNGramLogitsProcessor:
            processors[i] = _NgramBlocking(processor.ngram_size)
    return processors


@undoable
def _init_continuous_batching(self, *arguments, **options):
    """Continuous batching knows attentions of transformers by their names, and has a cache that others do not read. The
    model names them until its manager stops."""
    names = attentions.name_the_first(self)

    def give_back() -> None:
        for config, name in names:
            config._attn_implementation = name

    try:
        manager = type(self).init_continuous_batching(self, *arguments, **options)
    except BaseException:
        give_back()
        raise
    if names:
        def stop(*arguments, **options):
            try:
                return type(manager).stop(manager, *arguments, **options)
            finally:
                give_back()

        manager.stop = stop
    return manager


_LENGTHS = 64  # lengths of texts are rounded up to a multiple of it


class _NgramBlocking:
    def __init__(self, ngram_size: int):
        self.ngram_size = ngram_size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[-1] < self.ngram_size:
            return scores
        scores = scores.clone(memory_format=torch.contiguous_format)
        # A plan for every length would cost more than ids in front that match nothing.
        missing = -input_ids.shape[-1] % _LENGTHS
        if missing:
            input_ids = nn.functional.pad(input_ids, (missing, 0), value=-1)
        ops.ngram_block(input_ids, scores, self.ngram_size)
        return scores
