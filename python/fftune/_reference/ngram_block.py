"""ngram_block."""
import math

import torch


def ngram_block(ids, logits, n, padding, lengths, prefix, prefix_lengths, ns):
    """Row by row on the host, as a processor of logits does it."""
    rows, vocab = logits.shape
    beams = rows // prefix.shape[0] if prefix is not None else 1
    invalid = torch.zeros(rows, dtype=torch.int32)
    for row in range(rows):
        text = []
        if prefix is not None:
            group = prefix[row // beams]
            text += group[: prefix_lengths[row // beams]].tolist() if lengths is not None \
                else group.tolist()
        text += ids[row][: lengths[row]].tolist() if lengths is not None else ids[row].tolist()
        invalid[row] = sum(token != padding and not 0 <= token < vocab for token in text)
        size = int(ns[row]) if ns is not None else n
        if not 1 <= size <= len(text):
            continue
        last = text[len(text) - size + 1:]
        if padding in last:
            continue
        banned = [text[end] for end in range(size - 1, len(text))
                  if text[end - size + 1: end] == last and text[end] != padding
                  and 0 <= text[end] < vocab]
        if banned:
            logits[row, banned] = -math.inf
    return invalid.to(logits.device)
