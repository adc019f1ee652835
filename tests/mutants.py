"""Mutants of the package: one statement dropped, one comparison or constant off by one.

Each is written into a copy of the package and judged by the state machine in a process of its own,
without compilation. A mutant that no example tells from the original survives.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kvnumba"
TESTS = Path(__file__).parent
CPU_SECONDS = 30, 1.5  # for a run, and for each example: three times what is needed
BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break, ast.Raise)

JUDGE = """
import resource, sys
package, tests, n_examples, seconds = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
sys.path[:0] = [package, tests]
import kvnumba
assert kvnumba.__file__.startswith(package), kvnumba.__file__
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_unified_stateful import machine_of
for words in "two", "one word", "three":
    run_state_machine_as_test(machine_of(words), settings=settings(
        max_examples=int(n_examples), stateful_step_count=40, phases=[Phase.generate],
        deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)))
"""


@dataclass(frozen=True)
class Mutant:
    """One change: `name` is stable while the code around it is, `source` the whole module."""

    module: str
    name: str
    source: str


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may become of a node: a word for it, and the node that takes its place."""
    if isinstance(node, DROPPED) and not _is_docstring(node):
        yield "drop", ast.Pass()
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for table in (BOUNDARY, OPPOSITE):
            if type(node.ops[0]) in table:
                new = table[type(node.ops[0])]()
                yield "compare", ast.Compare(node.left, [new], node.comparators)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "one more", ast.Constant(node.value + 1)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def mutants_of(module: str, only: set[str] | None = None) -> Iterator[Mutant]:
    """Yield the mutants of a module's functions (those named in `only`)."""
    source = (PACKAGE / module).read_text()
    seen: Counter[str] = Counter()
    n_functions = len(_functions(ast.parse(source)))
    for f in range(n_functions):
        function = _functions(ast.parse(source))[f]
        if only is not None and function.name not in only:
            continue
        n_nodes = sum(1 for statement in function.body for _ in ast.walk(statement))
        for k in range(n_nodes):
            for kind in range(3):
                mutant = _mutant(source, module, f, k, kind)
                if mutant is not None:
                    seen[mutant.name] += 1
                    number = f" #{seen[mutant.name]}" if seen[mutant.name] > 1 else ""
                    yield Mutant(module, mutant.name + number, mutant.source)


def _mutant(source: str, module: str, f: int, k: int, kind: int) -> Mutant | None:
    tree = ast.parse(source)
    function = _functions(tree)[f]
    node = [n for statement in function.body for n in ast.walk(statement)][k]
    changes = list(_changes(node))
    if kind >= len(changes):
        return None
    word, new = changes[kind]
    what = ast.unparse(node)
    if word == "one more":
        what += " in " + _statement_of(function, node)
    _Replace(node, new).visit(tree)
    text = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(module, f"{module}: {function.name}: {word}: {what}", text)


def _statement_of(function: ast.FunctionDef, node: ast.AST) -> str:
    """The first line of the smallest statement around a node."""
    around = [s for s in ast.walk(function) if isinstance(s, ast.stmt) and node in ast.walk(s)]
    return ast.unparse(around[-1]).splitlines()[0]


def survives(mutant: Mutant, folder: Path, n_examples: int) -> bool:
    """Judge a mutant in a copy of the package; a run that never ends counts as caught."""
    copy = folder / "kvnumba"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
    (copy / mutant.module).write_text(mutant.source)
    try:
        return judge(folder, n_examples).returncode == 0
    finally:
        shutil.rmtree(folder)


def judge(folder: Path, n_examples: int) -> subprocess.CompletedProcess[str]:
    """Run the state machine on the package in `folder`."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    seconds = int(CPU_SECONDS[0] + CPU_SECONDS[1] * n_examples)
    args = [str(folder), str(TESTS), str(n_examples), str(seconds)]
    command = [sys.executable, "-W", "error", "-c", JUDGE, *args]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
