def tensor_model_parallel_all_reduce(x):
    """Of two ranks that have the same slice of weights."""
    return x + x
