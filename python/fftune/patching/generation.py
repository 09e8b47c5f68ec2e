"""generate(): the blocking of repeated n-grams by ngram-block."""
import types

import torch
from torch import Tensor, nn

from .. import ops
from .recognise import PatchReport, expect_methods, undoable


def patch_generation(model: nn.Module, report: PatchReport) -> None:
    if not hasattr(type(model), "_get_logits_processor"):
        return
    expect_methods(model, "_get_logits_processor")
    model.__dict__["_get_logits_processor"] = types.MethodType(_logits_processor, model)
    report.replaced.append(("generate", "no_repeat_ngram_size by ngram-block"))


@undoable
def _logits_processor(self, *arguments, **options):
    from transformers import NoRepeatNGramLogitsProcessor

    processors = type(self)._get_logits_processor(self, *arguments, **options)
    for i, processor in enumerate(processors):
        if type(processor) is NoRepeatNGramLogitsProcessor:
            processors[i] = _NgramBlocking(processor.ngram_size)
    return processors


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
