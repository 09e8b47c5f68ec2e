"""Private names of PyTorch and transformers, which versions rename, are read in _versions.py alone."""
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "fftune"
# In every supported version, and so widely used that PyTorch keeps them.
STABLE = {"torch._foreach_add_", "torch._foreach_copy_", "torch._dynamo.mark_static_address"}


def _full_name(node: ast.Attribute, imported: dict[str, str]) -> str | None:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([imported.get(node.id, node.id), *parts[::-1]]) if isinstance(node, ast.Name) else None


def private_names(text: str) -> set[str]:
    """The private names of torch and transformers that a module reads."""
    tree = ast.parse(text, feature_version=(3, 10))
    imported, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            imported |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {alias.name for alias in node.names}
    found |= set(imported.values())
    outer = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in outer:
            outer |= {child for child in ast.walk(node) if child is not node}
            if name := _full_name(node, imported):
                found.add(name)
    return {name for name in found if name.split(".")[0] in ("torch", "transformers")
            and any(part[0] == "_" and part[:2] != "__" for part in name.split("."))}


def test_one_file_reads_private_names():
    found = {path.relative_to(ROOT): private_names(path.read_text()) - STABLE
             for path in ROOT.rglob("*.py") if path.name != "_versions.py"}
    assert len(found) > 60
    assert not {str(path): sorted(names) for path, names in found.items() if names}


def test_private_names_are_found():
    assert private_names("""
import torch.nn.functional as F
from torch import _C
from torch.nn.modules import module as m
from transformers.utils import output_capturing
def f(x):
    import torch._inductor
    return F._one(x), _C.two, m._three.four, output_capturing._five, x._six, torch.__version__, torch.add(x, x)
""") == {"torch.nn.functional._one", "torch._C", "torch._C.two", "torch.nn.modules.module._three.four",
         "transformers.utils.output_capturing._five", "torch._inductor"}
