"""Changes to modules that are made right after their import, by whoever imports them."""
import functools
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from typing import Callable

from .interfaces import expect_known
from .logs import log, reason_of

_waiting: dict[str, Callable] = {}  # what is to be done to modules that are not imported yet


def after_import(name: str, change: Callable) -> None:
    """Calls change(module) when the module is imported; at once if it is. `change` may be called
    again for a module that it changed already."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        _try(change, module)
        return
    _waiting[name] = change
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap_methods(module, classes: tuple[str, ...], name: str, make: Callable) -> None:
    """Puts make(class, method) in the place of this method of the module's own classes, once."""
    for cls in (getattr(module, own, None) for own in classes):
        method = getattr(cls, name, None)
        if method is None or cls.__module__ != module.__name__ or hasattr(method, "_fftune_original"):
            continue
        wrapped = functools.wraps(method)(make(cls, method))
        wrapped._fftune_original = method
        setattr(cls, name, wrapped)


def _try(change: Callable, module) -> None:
    """A module with other functions than those that are known stays as it is: its import is not to fail."""
    try:
        expect_known(module)
        change(module)
    except Exception as error:
        log(f"{module.__name__} stays vLLM's: {reason_of(error)}")


class _Finder(MetaPathFinder):
    """Finds the modules that are waited for by the other finders, and changes them once their code
    has run."""

    def find_spec(self, name, path=None, target=None):
        if name not in _waiting:
            return None
        spec = None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find and find(name, path, target)
            if spec is not None:
                break
        # A loader of files belongs to its spec alone.
        if spec is not None and isinstance(spec.loader, (SourceFileLoader, SourcelessFileLoader)):
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                change = _waiting.pop(name, None)
                if change is not None:
                    _try(change, module)

            spec.loader.exec_module = exec_module
        return spec
