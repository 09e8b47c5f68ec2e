"""The ranks of tensor parallelism: their common decisions, and the group of their devices.

All ranks run the same batches. A rank that took another path than its peers would wait for a sum that
nobody sends. So what one rank finds out decides for all of them.
"""
import secrets
from contextlib import contextmanager

import torch

from .._library import Error
from ..distributed import Group, host
from . import faster
from .logs import Unfit, log, one_line

# Seconds that a kernel waits for a peer: as long as vLLM waits for a step
# (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS). So an engine whose step fails has ended.
TIMEOUT = 300


def of_all(own):
    """The values of `own` on all ranks, in their order. All ranks call it."""
    from vllm.distributed import get_tp_group

    ranks = get_tp_group()
    found = [own] * ranks.world_size
    if ranks.world_size > 1:
        torch.distributed.all_gather_object(found, own, group=ranks.cpu_group)
    return found


def common_reason(own: str | None) -> str | None:
    """The first reason of a rank; without one None if a rank has None, which says nothing, else ""."""
    found = of_all(own)
    for rank, reason in enumerate(found):
        if reason:
            return reason if len(set(found)) == 1 else f"{reason} on rank {rank}"
    return None if None in found else ""


@contextmanager
def summing():
    """Has vLLM's custom all-reduce sum. In the warm-up of a capture it only allocates: its result is
    memory that nobody wrote."""
    from vllm.distributed import get_tp_group

    custom = getattr(getattr(get_tp_group(), "device_communicator", None), "ca_comm", None)
    was = getattr(custom, "_IS_CAPTURING", False)
    if was:
        custom._IS_CAPTURING = False
    try:
        yield
    finally:
        if was:
            custom._IS_CAPTURING = True


class Together(faster.Alone):
    """The ranks as they measure: in step. Where one of them fails, all of them do."""

    def all(self, own) -> list:
        found = of_all(("", own))
        for rank, (reason, _) in enumerate(found):
            if reason:
                raise Unfit(f"{reason} on rank {rank}")
        return [value for _, value in found]

    @staticmethod
    def fail(reason: str) -> None:
        """Tells the peers, which are in all(), or will be."""
        of_all((reason, None))

    @contextmanager
    def capturing(self):
        """vLLM's custom all-reduce gives the peers the buffers of a capture when it ends."""
        from vllm.distributed import get_tp_group

        custom = getattr(getattr(get_tp_group(), "device_communicator", None), "ca_comm", None)
        if custom is None or getattr(custom, "disabled", True):
            yield
            return
        was = custom._IS_CAPTURING
        try:
            with custom.capture():
                yield
        finally:
            custom._IS_CAPTURING = was


def group_of(rows: int, like: torch.Tensor) -> Group | None:
    """A group whose messages have so many rows as long as `like`, on its device; None where one rank
    cannot make it. All ranks call it."""
    from vllm.distributed import get_tp_group

    own, group, reason = get_tp_group(), None, ""
    if own.world_size == 1:
        return None
    try:
        here = host()
    except OSError:  # then the meeting decides
        here = ""
    names, hosts = zip(*of_all((secrets.token_hex(16), here)))
    try:
        if len(set(hosts)) > 1:
            raise Error("the ranks are on several hosts")
        group = Group(names[0], own.rank_in_group, own.world_size, device=like.device,
                      max_bytes=-(-rows * like.nbytes // 4096) * 4096, timeout=TIMEOUT)
    except Exception as error:
        reason = one_line(error)
    reason = common_reason(reason)
    if not reason:
        return group
    if group is not None:
        group.close()
    log(f"layers run op by op, with vLLM's all-reduce: {reason}")
    return None
