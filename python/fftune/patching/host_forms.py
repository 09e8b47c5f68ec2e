"""Modules that call packages of kernels, such as flash-linear-attention and causal-conv1d, on the CPU. patch() tries
modules of a GPU there too, and such kernels do not run there. transformers has functions of PyTorch for machines
without the packages: these stand in."""
import functools
import inspect
import sys
import types
from contextlib import contextmanager
from threading import Lock

from torch import Tensor, nn

from .._versions import pytree

# Variables of transformers' functions that call one of a package, or their own.
_CELLS = ("implementation", "torch_function", "applicable_params")
_lock = Lock()
_users: dict[int, list] = {}  # of a cell: how many calls of patch() need it, and what it had before


def _on_cpu(*arguments) -> bool:
    return all(t.device.type == "cpu" for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor))


def _by_device(theirs, ours):
    """`theirs`, and `ours` for tensors of the CPU; each gets the options that it has."""
    names = [inspect.signature(function).parameters for function in (theirs, ours)]

    @functools.wraps(ours)
    def chosen(*arguments, **options):
        is_ours = _on_cpu(arguments, options)
        own = {name: value for name, value in options.items() if name in names[is_ours]}
        return (ours if is_ours else theirs)(*arguments, **own)
    return chosen, tuple({**names[0], **names[1]})


def _choices(namespace: dict):
    """The cells of the namespace's functions that choose one of a package."""
    for function in list(namespace.values()):
        while isinstance(function, types.FunctionType):
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
            if all(name in cells for name in _CELLS):
                theirs, ours, _ = (cells[name].cell_contents for name in _CELLS)
                if theirs is not ours:
                    yield tuple(cells[name] for name in _CELLS)
                break
            function = getattr(function, "__wrapped__", None)


@contextmanager
def host_forms(model: nn.Module):
    """While it is open, the model's modules run on the CPU whatever packages of kernels they use."""
    spaces = {name: vars(sys.modules[name]) for name in {type(m).__module__ for m in model.modules()}
              if name in sys.modules}
    cells = [of for space in spaces.values() for of in _choices(space)]
    # Before transformers 5.20 modules keep the functions as attributes.
    kept = [(m, name, value, ours) for m in model.modules() for name, value in vars(m).items()
            if isinstance(value, types.FunctionType) and value.__module__ != type(m).__module__
            and isinstance(ours := spaces.get(type(m).__module__, {}).get(f"torch_{name}"), types.FunctionType)]
    with _lock:
        for implementation, torch_function, applicable in cells:
            if id(implementation) not in _users:
                _users[id(implementation)] = [0, implementation.cell_contents, applicable.cell_contents]
                implementation.cell_contents, applicable.cell_contents = _by_device(
                    implementation.cell_contents, torch_function.cell_contents)
            _users[id(implementation)][0] += 1
    for m, name, value, ours in kept:
        m.__dict__[name] = _by_device(value, ours)[0]
    try:
        yield
    finally:
        for m, name, value, _ in kept:
            m.__dict__[name] = value
        with _lock:
            for implementation, _, applicable in cells:
                users = _users[id(implementation)]
                users[0] -= 1
                if not users[0]:
                    _, implementation.cell_contents, applicable.cell_contents = _users.pop(id(implementation))
