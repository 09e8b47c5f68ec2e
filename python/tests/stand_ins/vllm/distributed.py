def tensor_model_parallel_all_reduce(x):
    """The sum over two ranks with the same slice of weights."""
    return x + x
