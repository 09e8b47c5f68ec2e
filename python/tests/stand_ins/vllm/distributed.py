from types import SimpleNamespace

_ranks = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)


def get_tp_group():
    return _ranks


def tensor_model_parallel_all_reduce(x):
    """The sum over the ranks; in one process over two with the same slice of weights."""
    if _ranks.world_size == 1:
        return x + x
    import torch.distributed as dist

    y = x.float() if x.element_size() < 4 else x.clone()
    dist.all_reduce(y, group=_ranks.cpu_group)
    return y.to(x.dtype)
