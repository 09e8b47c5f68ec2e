"""fftune/ops.pyi says what fftune.ops and the table of ops say; the target type_stubs writes it."""
import ast
import importlib.util
import inspect
from pathlib import Path

import pytest

import fftune
from fftune import ops

GENERATOR = Path(__file__).resolve().parents[1] / "type_stubs.py"
STUBS = Path(fftune.__file__).with_name("ops.pyi")


def defined(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def test_the_stubs_are_current():
    spec = importlib.util.spec_from_file_location("type_stubs", GENERATOR)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert STUBS.read_text() == generator.stubs(), "ninja -C build/ci type_stubs"


def test_every_function_of_ops_has_a_stub_with_its_parameters():
    stubs = defined(STUBS.read_text())
    functions = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert stubs.keys() == functions
    for name, stub in stubs.items():
        own = stub.args
        names = [arg.arg for arg in [*own.args, *filter(None, [own.vararg]), *own.kwonlyargs]]
        assert names == list(inspect.signature(getattr(ops, name)).parameters), name


# By hand, from the documentation of the ops.
@pytest.mark.parametrize("function, parameter, words", [
    ("ffn", "act", "Literal['silu', 'gelu', 'gelu-tanh', 'relu', 'none']"),
    ("act_mul", "act", "Literal['silu', 'gelu', 'gelu-tanh', 'relu']"),
    ("rmsnorm", "convention", "Literal['llama', 'gemma', 't5']"),
    ("rope", "rotation", "Literal['halves', 'interleaved']"),
    ("moe_route", "group_score", "Literal['max', 'top2']"),
    ("bias_gelu", "approximate", "str"),
])
def test_an_option_has_its_words_as_type(function, parameter, words):
    own = defined(STUBS.read_text())[function].args
    found, = (arg for arg in [*own.args, *own.kwonlyargs] if arg.arg == parameter)
    assert ast.unparse(found.annotation) == words
