"""The declarations of fftune/_ops, read without PyTorch, which a machine that builds a wheel need not have.

The modules run as ever. PyTorch, and the modules of the package that need more of it than names, are
replaced by modules that have every attribute, as Sphinx's `autodoc_mock_imports` does.
"""
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Mapping

from stubs import PACKAGE

REPLACED = {"torch", *(f"fftune.{name}" for name in (
    "_built", "_custom", "_generated_ops", "_run", "_versions", "distributed", "reference"))}


class _Anything:
    """An attribute of a replaced module: a type, a base of a class, a function, a decorator."""

    def __init__(self, name: str):
        self.__name__ = name

    def __repr__(self) -> str:
        return self.__name__

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)  # the same one each time
        return value

    def __call__(self, *arguments, **options):
        return _Anything(f"{self.__name__}()")

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases) -> tuple:
        return ()


class _Module(_Anything, ModuleType):
    __path__ = ()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        if name in REPLACED or name.split(".")[0] in REPLACED:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def declared_forms() -> Mapping:
    """The DerivedForm of each op that is declared, by its name. The table is in its file."""
    sys.meta_path.insert(0, _Finder())
    package = ModuleType("fftune")  # its own __init__ opens the library
    package.__path__ = [str(PACKAGE)]
    sys.modules["fftune"] = package
    for path in sorted((PACKAGE / "_ops").glob("*.py")):
        importlib.import_module(f"fftune._ops.{path.stem}")
    return sys.modules["fftune._declare"].FORMS
