"""The layer law: imports point down. And importing the package is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvnumba"
LAYERS = {
    0: {"errors", "config", "dtypes", "rope_config", "config_fields", "recurrent_config"}
    | {"composite_config"},
    1: {"kernels"},
    2: {"batch", "cells", "mapping", "pack", "layers", "prefix", "guard", "view", "placement"}
    | {"upkeep", "reading", "steps", "queries", "verbs", "files", "packs", "status", "memory"}
    | {"admission", "splitting", "batch_rules", "sliding", "unified_steps", "placing", "masks"}
    | {"extra_positions", "recurrent_cells", "recurrent_rows", "recurrent_steps"}
    | {"recurrent_placing", "recurrent_verbs"},
    3: {"unified", "recurrent", "composite", "window", "hybrid", "streams"},
    4: {"store", "prefill", "checkpoints", "branches"},
    5: {"runner", "replay"},
    6: {"cli"},
    7: {"__init__", "__main__"},
}
LAYER_OF = {name: level for level, names in LAYERS.items() for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))


def _top(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imports(tree: ast.AST) -> list[str]:
    """All modules imported, those under TYPE_CHECKING left out."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if _is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module"
            if node.module == "kvnumba":
                found += [f"kvnumba.{a.name}" for a in node.names]
            elif node.module:
                found.append(node.module)
        found += _imports(node)
    return found


def test_every_module_has_a_layer():
    assert {_top(m) for m in MODULES} <= set(LAYER_OF)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(PACKAGE)))
def test_imports_point_down(module):
    level = LAYER_OF[_top(module)]
    for name in _imports(ast.parse(module.read_text())):
        if not name.startswith("kvnumba."):
            continue
        target = name.split(".")[1]
        if target not in LAYER_OF:  # a name that __init__ defines, such as __version__
            continue
        assert LAYER_OF[target] <= level, f"{_top(module)} (layer {level}) imports {name}"
        if level == 0:
            assert target in LAYERS[0]


@pytest.mark.parametrize("module", sorted((PACKAGE / "kernels").glob("*.py")), ids=lambda m: m.name)
def test_kernels_import_only_numpy_and_numba(module):
    allowed = {"numpy", "numba", "llvmlite", *sys.stdlib_module_names}
    for name in _imports(ast.parse(module.read_text())):
        assert name.split(".")[0] in allowed or name.startswith("kvnumba.kernels"), name


def test_no_import_cycles():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        name = ".".join(("kvnumba", *module.relative_to(PACKAGE).with_suffix("").parts))
        body = ast.parse(module.read_text())
        graph[name.removesuffix(".__init__")] = {
            i for i in _imports(body) if i.startswith("kvnumba.")
        }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join((*path, name))}"
        if name in done or name not in graph:
            return
        for target in graph[name]:
            visit(target, (*path, name))
        done.add(name)

    for name in graph:
        if name != "kvnumba":
            visit(name, ())


def _python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_bare_import_loads_no_numba_and_is_fast():
    code = (
        "import time, sys, numpy; t = time.process_time(); import kvnumba;"
        "print(time.process_time() - t, 'numba' in sys.modules)"
    )
    seconds, has_numba = min(_python(code).split() for _ in range(3))
    assert has_numba == "False"
    assert float(seconds) < 0.2


def test_public_names_resolve():
    import kvnumba

    assert len(kvnumba.__all__) <= 15
    for name in kvnumba.__all__:
        assert getattr(kvnumba, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = kvnumba.no_such_name
