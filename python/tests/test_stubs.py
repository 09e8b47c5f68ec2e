"""The generated files of the package are current; fftune/ops.pyi says what fftune.ops does."""
import ast
import inspect
import shutil
from pathlib import Path

import pytest

import fftune
from fftune import ops
from fftune._library import library_path, tool_path

GENERATOR = Path(__file__).resolve().parents[1] / "generator"
STUBS = Path(fftune.__file__).with_name("ops.pyi")
GENERATED = ("_generated_ops.py", "_op_table.json", "ops.pyi")


def defined(text: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def checkout(folder: Path) -> Path:
    """The package without its generated files, and the generator beside it."""
    package = folder / "fftune"
    shutil.copytree(Path(fftune.__file__).parent, package,
                    ignore=shutil.ignore_patterns(*GENERATED, "__pycache__", "lib", "share"))
    shutil.copytree(GENERATOR, folder / "generator")
    return package


def test_a_checkout_makes_its_files_with_the_tool(tmp_path, run_python):
    """And the package's are those that the tool and the sources of today make."""
    package = checkout(tmp_path)
    run_python("import fftune.ops", PYTHONPATH=str(tmp_path), FFTUNE_TOOL=str(tool_path()),
               FFTUNE_LIBRARY=str(library_path()))
    for name in GENERATED:
        assert STUBS.with_name(name).read_text() == (package / name).read_text(), (
            f"{name} is old: ninja -C build/ci python_files")


def test_a_checkout_without_a_build_says_what_to_run(tmp_path, run_python):
    package = checkout(tmp_path)
    program = """
        try:
            import fftune.ops
        except ImportError as error:
            print(error)
    """
    environment = {"PYTHONPATH": str(tmp_path), "FFTUNE_LIBRARY": str(library_path())}
    words = run_python(program, FFTUNE_TOOL=str(tmp_path / "none"), **environment)
    assert words == (f"{package}/_op_table.json is missing, and {tmp_path}/none could not write it: "
                     "run `ninja -C build/ci python_files`")
    shutil.rmtree(tmp_path / "generator")  # as an installed package is
    words = run_python(program, **environment)
    assert words == f"{package}/_op_table.json is missing: install the wheel again"


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
