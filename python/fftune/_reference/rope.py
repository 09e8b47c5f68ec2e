"""Rotary embeddings."""
import math

import torch
from torch import Tensor


def _frequencies(rotary: int, rule: str, numbers: list[float]) -> tuple[Tensor, float]:
    """Frequencies of the pairs, and the factor of sines and cosines, by kernels/rope/rope.hpp."""
    base, factor, context, low, high, beta_fast, beta_slow, scale = numbers
    exponents = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    plain = base**-exponents
    if rule == "base":
        return (plain / factor).float(), scale or 1.0
    if rule == "llama3":
        turns = context * plain / (2 * math.pi)  # context / wavelength
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return ((1 - share) * plain / factor + share * plain).float(), scale or 1.0

    def pair(turns: float) -> float:
        return rotary * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair(beta_fast)), 0)
    last = min(math.ceil(pair(beta_slow)), rotary - 1)
    ramp = (torch.arange(rotary // 2) - first) / max(last - first, 1e-3)
    share = 1 - ramp.clamp(0, 1)
    own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return ((1 - share) * plain / factor + share * plain).float(), scale or own


def _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers):
    """The angle of every rotated feature, [..., tokens, 1, rotary], and the factor."""
    rotary = rotary or q.shape[-1]
    if offsets is not None:
        token = torch.arange(q.shape[0], device=q.device)
        sequence = torch.searchsorted(offsets[1:].contiguous(), token.to(offsets.dtype), right=True)
        position = token - offsets[sequence]
        if starts is not None:
            position = position + starts[sequence]
    else:
        position = torch.arange(q.shape[1], device=q.device).expand(q.shape[0], -1)
        if starts is not None:
            position = position + starts[:, None]
    angle, factor = angles_at(position, angles, rotation, rotary, rule, numbers)
    return angle.unsqueeze(-2), factor


def angles_at(position, angles, rotation, rotary, rule, numbers):
    """The angle of every rotated feature at positions [...], [..., rotary], and the factor."""
    if rule == "table":
        return angles[position.long().clamp(0, angles.shape[0] - 1)], numbers[7] or 1.0
    values, factor = _frequencies(rotary, rule, numbers)
    pairs = position[..., None].float() * values.to(position.device)
    return (torch.cat((pairs, pairs), -1) if rotation == "halves"
            else pairs.repeat_interleave(2, -1)), factor


def _partners(x: Tensor, rotation: str) -> Tensor:
    """r of y = x cos f + r sin f."""
    if rotation == "halves":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def _rotated(x: Tensor, angle: Tensor, factor: float, rotation: str, back: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    rotary = angle.shape[-1]
    part, rest = x[..., :rotary].to(wide), x[..., rotary:]
    cosine, sine = angle.to(wide).cos() * factor, angle.to(wide).sin() * factor
    if back:
        y = part * cosine - _partners(part * sine, rotation)
    else:
        y = part * cosine + _partners(part, rotation) * sine
    return torch.cat((y.to(x.dtype), rest), -1)


def rope(q, angles, starts, offsets, rotation, rotary, rule, numbers, back=False):
    angle, factor = _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers)
    return _rotated(q, angle, factor, rotation, back)


def rope_backward(dq, *arguments):
    return rope(dq, *arguments, back=True)


def rope_qk(q, k, *arguments, back=False):
    angles, starts, offsets, rotation, rotary, rule, numbers = arguments
    angle, factor = _rope_angles(q, angles, starts, offsets, rotation, rotary, rule, numbers)
    return _rotated(q, angle, factor, rotation, back), _rotated(k, angle, factor, rotation, back)


def rope_qk_backward(dq, dk, *arguments):
    return rope_qk(dq, dk, *arguments, back=True)
