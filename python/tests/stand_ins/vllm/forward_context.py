from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class ForwardContext:
    attn_metadata: dict | None
    slot_mapping: dict | None = None  # by which keys and values are written
    moe_layer_index: int = 0


_context = None


def is_forward_context_available() -> bool:
    return _context is not None


def get_forward_context() -> ForwardContext:
    return _context


@contextmanager
def set_forward_context(attn_metadata):
    global _context
    _context = ForwardContext(attn_metadata, {
        name: getattr(one, "slots_of_context", (getattr(one, "slot_mapping", None),))[0]
        for name, one in attn_metadata.items()}
        if isinstance(attn_metadata, dict) else None)
    try:
        yield _context
    finally:
        _context = None
