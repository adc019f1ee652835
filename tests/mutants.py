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
CPU_SECONDS = 90
"""For one run; several times what it needs. Dropped statements make loops without end."""

BOUNDARY = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Continue, ast.Break, ast.Raise)

START = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
package, tests, *args = sys.argv[1:]
sys.path[:0] = [package, tests]
import kvnumba
assert kvnumba.__file__.startswith(package), kvnumba.__file__
"""
MACHINE = """
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_unified_stateful import machine_of
limits = settings(
    max_examples=int(args[0]), stateful_step_count=40, phases=[Phase.generate], deadline=None,
    database=None, derandomize=True, suppress_health_check=list(HealthCheck))
for shared in "copy", "move", "refuse":
    for words in "two", "one word", "three":
        run_state_machine_as_test(machine_of(words, shared), settings=limits)
"""
DIRECT = """
import pytest
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *args]))
"""


@dataclass(frozen=True)
class Mutant:
    """One change: `name` is stable while the code around it is; `number` finds the changed node."""

    module: str
    name: str
    number: int
    kind: int

    @property
    def source(self) -> str:
        """The whole module, changed."""
        tree = ast.parse((PACKAGE / self.module).read_text())
        node = list(ast.walk(tree))[self.number]
        _, new = list(_changes(node))[self.kind]
        return ast.unparse(ast.fix_missing_locations(_Replace(node, new).visit(tree)))


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


def mutants_of(module: str) -> Iterator[Mutant]:
    """Yield the mutants of a module's functions."""
    tree = ast.parse((PACKAGE / module).read_text())
    numbers = {node: number for number, node in enumerate(ast.walk(tree))}
    seen: Counter[str] = Counter()
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        raised = [n for s in ast.walk(function) if isinstance(s, ast.Raise) for n in ast.walk(s)]
        for statement in function.body:
            for node in ast.walk(statement):
                if node in raised and not isinstance(node, ast.Raise):
                    continue  # a message
                for kind, (word, _) in enumerate(_changes(node)):
                    name = f"{module}: {function.name}: {word}: {ast.unparse(node)}"
                    if word == "one more":
                        name += " in " + _statement_of(function, node)
                    seen[name] += 1
                    suffix = f" #{seen[name]}" if seen[name] > 1 else ""
                    yield Mutant(module, name + suffix, numbers[node], kind)


def _statement_of(function: ast.FunctionDef, node: ast.AST) -> str:
    """The first line of the smallest statement around a node."""
    around = [s for s in ast.walk(function) if isinstance(s, ast.stmt) and node in ast.walk(s)]
    return ast.unparse(around[-1]).splitlines()[0]


def survives(
    mutant: Mutant | None, folder: Path, n_examples: int, direct: tuple[str, ...] = ()
) -> bool:
    """Judge a mutant (None: the original) in a copy of the package.

    What the state machine lets pass is judged by the test files `direct`. A run that never ends
    counts as caught.
    """
    copy = folder / "kvnumba"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.nb?"))
    if mutant is not None:
        (copy / mutant.module).write_text(mutant.source)
    files = [str(TESTS / name) for name in direct]
    try:
        return _passes(folder, MACHINE, str(n_examples)) and (
            not files or _passes(folder, DIRECT, *files)
        )
    finally:
        shutil.rmtree(folder)


def _passes(folder: Path, code: str, *args: str) -> bool:
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", START + code, str(folder), str(TESTS), *args]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True).returncode == 0
