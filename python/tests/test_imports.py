"""The modules of the package import each other in one direction: no loops, also within functions."""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "fftune"


def modules_of(root: Path) -> dict[str, Path]:
    """Files by the names of their modules."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports anywhere, but for the sake of types."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{home}.{alias.name}" if f"{home}.{alias.name}" in modules else home
                      for alias in node.names}
    return found & modules.keys() - {name}


def loops(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that all lead to each other."""
    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            for other in edges[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        return seen

    all_reached = {name: reached(name) for name in edges}
    groups = {frozenset(other for other in all_reached[name] if name in all_reached[other])
              for name in edges if name in all_reached[name]}
    return sorted(sorted(group) for group in groups)


def test_no_module_imports_itself_through_others():
    modules = modules_of(ROOT)
    edges = {name: imports_of(name, path, modules) for name, path in modules.items()}
    assert len(edges) > 30 and "fftune._library" in edges["fftune._run"]
    assert loops(edges) == []


def test_a_loop_is_found_wherever_it_is_closed(tmp_path):
    root = tmp_path / "package"
    (root / "inner").mkdir(parents=True)
    for name, text in {"__init__": "", "one": "from .inner import two", "other": "import ast",
                       "inner/__init__": "from .. import other",
                       "inner/two": "def f():\n    from ..one import g\n"}.items():
        (root / f"{name}.py").write_text(text + "\n")
    modules = modules_of(root)
    edges = {name: imports_of(name, path, modules) for name, path in modules.items()}
    assert edges["package.inner"] == {"package.other"}
    assert loops(edges) == [["package.inner.two", "package.one"]]
