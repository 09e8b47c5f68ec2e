"""ngram_block: logits of tokens that would repeat an n-gram of their row become -inf."""
import torch
from torch import Tensor

from .._custom import OPS, call
from .._checks import int32
from .._declare import declare
from .._library import Error


def _expect_prefixes(ids, prefix, lengths, prefix_lengths, **_):
    if prefix is None:
        if prefix_lengths is not None:
            raise Error("ngram-block: prefix_lengths without prefix: give both")
        return
    if not len(prefix) or len(ids) % len(prefix):
        raise Error(f"ngram-block: {len(ids)} rows cannot share {len(prefix)} prefixes evenly")
    if (lengths is None) != (prefix_lengths is None):
        raise Error("ngram-block: give lengths of the rows and of the prefixes, or of neither")


def _fill(fields, ids, prefix, padding, ns, **_):
    fields["beams"] = None if prefix is None else len(ids) // len(prefix)
    if ns is not None:
        fields["n"] = None
    if padding == -1:
        fields["padding"] = None


# The library's rows have at least one place; where only prefixes have ids, none of it counts.
def _of_prefixes(ids, prefix) -> bool:
    return prefix is not None and not ids.shape[-1] and prefix.shape[-1] > 0


def _ids(t, prefix):
    return t.new_zeros(*t.shape[:-1], 1) if _of_prefixes(t, prefix) else t


def _lengths(t, ids, prefix, prefix_lengths):
    if _of_prefixes(ids, prefix) and (t is not None or prefix_lengths is None):
        return ids.new_zeros(len(ids), dtype=torch.int32)
    return int32("ngram-block", "lengths", t)


def _prefix_lengths(t, ids, prefix, lengths):
    if _of_prefixes(ids, prefix) and t is None and lengths is None:
        return ids.new_full(prefix.shape[:1], prefix.shape[-1], dtype=torch.int32)
    return int32("ngram-block", "prefix_lengths", t)


declare("ngram_block", "ngram-block", "ids, logits!, n:int, padding:int, lengths:ints?, prefix?, "
        "prefix_lengths:ints?, ns=n:ints?", "invalid", names={"ns": "n"}, check=_expect_prefixes,
        fill=_fill, prepare={"ids": _ids, "lengths": _lengths, "prefix_lengths": _prefix_lengths},
        shapes={"ids": "[rows, length]", "logits": "[rows, vocabulary]", "lengths": "[batch]",
                "prefix": "[prefixes, length]", "prefix_lengths": "[prefixes]", "ns": "[rows]"})


def ngram_block(ids: Tensor, logits: Tensor, n: int | Tensor = 3, *, padding: int = -1,
                lengths: Tensor | None = None, prefix: Tensor | None = None,
                prefix_lengths: Tensor | None = None) -> Tensor:
    """Sets logits to -inf, in place, of tokens that would repeat an n-gram of their row.

    Args:
        ids: The generated ids, int32 or int64 [rows, length].
        logits: Updated in place, [rows, vocabulary].
        n: Length of the n-grams, an int for all rows or a tensor [rows].
        padding: An id that matches nothing.
        lengths: Number of ids of each row that count, [rows].
        prefix: Ids in front of `ids` that neighbouring rows share, [rows / beams, length].
        prefix_lengths: Number of prefix ids that count, [rows / beams].

    Returns:
        int32 [rows]: how many ids of each row are outside of the vocabulary.
    """
    ns = n if isinstance(n, Tensor) else None
    return call(OPS.ngram_block, ids, logits, 1 if ns is not None else n, padding,
                 lengths, prefix, prefix_lengths, ns)
