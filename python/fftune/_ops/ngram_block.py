"""ngram_block: logits of tokens that would repeat an n-gram of their row become -inf."""
import torch
from torch import Tensor

from .._checks import expect, int32
from .._custom import OPS, call, empty, fake
from .._declare import define
from .._library import Error
from .._run import Form, ready, run


def _ngram_values(options, ids, logits, prefix, lengths, prefix_lengths, ns):
    n, padding = options
    b, vocab = logits.shape
    expect("ngram-block", "ids", ids, (b, ids.shape[-1]))
    expect("ngram-block", "lengths", lengths, (b,))
    expect("ngram-block", "n", ns, (b,))
    beams = None
    if prefix is not None:
        groups = prefix.shape[0]
        if not groups or b % groups:
            raise Error(f"ngram-block: {b} rows cannot share {groups} prefixes evenly")
        expect("ngram-block", "prefix", prefix, (groups, prefix.shape[-1]), ids.dtype)
        expect("ngram-block", "prefix_lengths", prefix_lengths, (groups,))
        beams = b // groups
        if (lengths is None) != (prefix_lengths is None):
            raise Error("ngram-block: give lengths of the rows and of the prefixes, or of neither")
    if not ids.numel():
        return None
    return (b, ids.shape[-1], vocab, None if prefix is None else prefix.shape[-1], beams,
            "i64" if ids.dtype == torch.int64 else "i32", None if lengths is None else "own",
            None if ns is None else "own", None if ns is not None else float(n),
            None if padding == -1 else float(padding))


@define("ngram_block", "ngram-block", "ids, logits!, n:int, padding:int, lengths:ints?, prefix?, "
        "prefix_lengths:ints?, ns=n:ints?", "Tensor",
        shapes={"ids": "[rows, length]", "logits": "[rows, vocabulary]", "prefix": "[prefixes, length]",
                "lengths": "[batch]", "prefix_lengths": "[prefixes]", "ns": "[rows]"})
def _(ids, logits, n, padding, lengths, prefix, prefix_lengths, ns):
    invalid = empty(logits, logits.shape[0], dtype=torch.int32)
    own = ready(logits)
    if prefix is not None and not ids.shape[-1] and prefix.shape[-1]:
        # The library's rows have at least one place; here no id of it counts.
        ids = ids.new_zeros(*ids.shape[:-1], 1)
        if prefix_lengths is None and lengths is None:
            lengths = ids.new_zeros(ids.shape[0])
            prefix_lengths = ids.new_full(prefix.shape[:1], prefix.shape[-1])
        elif lengths is not None:
            lengths = torch.zeros_like(lengths)
    counts = [int32("ngram-block", name, t) for name, t in (
        ("lengths", lengths), ("prefix_lengths", prefix_lengths), ("n", ns))]
    run(_NGRAM, (n, padding), (ids, own, prefix, *counts), (invalid,))
    if own is not logits:
        logits.copy_(own)
    return invalid


_NGRAM = Form("ngram-block", False, OPS.ngram_block.kinds,
              ("b", "len", "vocab", "prefix", "beams", "ids", "lengths", "ngrams", "n", "padding"),
              _ngram_values, typed_by=1)


@fake("ngram_block")
def _(ids, logits, *others):
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


def ngram_block(ids: Tensor, logits: Tensor, n: int | Tensor = 3, *, padding: int = -1,
                lengths: Tensor | None = None, prefix: Tensor | None = None,
                prefix_lengths: Tensor | None = None) -> Tensor:
    """Sets, in place, the logits to -inf of tokens that would repeat an n-gram of their row.

    `ids` [rows, length] of int32 or int64: the generated ids. `logits` [rows, vocabulary]; `n` one
    for all rows or [rows]; `padding`: an id that never matches; `lengths` [rows]: how many ids of
    each row count. `prefix` [rows / beams, length]: ids in front of theirs that neighbouring rows
    share, with prefix_lengths. Returns int32 [rows]: how many ids of each row are no tokens.
    """
    ns = n if isinstance(n, Tensor) else None
    return call(OPS.ngram_block, ids, logits, 1 if ns is not None else n, padding,
                 lengths, prefix, prefix_lengths, ns)
