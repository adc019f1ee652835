"""The README's Python runs, and every command and public name is in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import kvnumba
from kvnumba.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.skipif(sys.platform != "linux", reason="sessions need Linux")
def test_python_blocks_run_in_order_and_print_what_is_said(tmp_path, monkeypatch, capsys):
    assert len(BLOCKS) == 2
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    out = capsys.readouterr().out.splitlines()
    assert out == ["4 3 1 (4, 9, 64)", "[]"]
    assert f"It prints `{out[0]}`" in README


def _said(text: str) -> list[str]:
    """The code in the sentences that say what an example prints."""
    sentences = re.findall(r"It prints (.*?)[:.](?:\s|$)", text, re.DOTALL)
    return [said for s in sentences for said in re.findall(r"`([^`]*)`", s)]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_python_blocks_of_the_docs_run_and_print_what_is_said(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, page.name, "exec"), names)
    assert capsys.readouterr().out.splitlines() == _said(text)


def test_first_example_is_short():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 18


def test_every_command_is_documented():
    for command in COMMANDS:
        assert f"`kvnumba {command}" in README


@pytest.mark.parametrize("name", sorted(set(kvnumba.__all__) - {"__version__", "KVCacheError"}))
def test_public_names_are_shown_and_documented(name):
    assert re.search(rf"\b{name}\b", README)
    assert len(getattr(kvnumba, name).__doc__) > 40


def test_both_commands_exist_and_run_bash():
    for script in ("demo.sh", "test.sh"):
        path = ROOT / "scripts" / script
        assert f"scripts/{script}" in README
        assert path.stat().st_mode & 0o111


def test_the_demo_s_output_is_in_the_readme():
    shown = README.partition("<!-- demo:")[2].partition("<!-- end of demo -->")[0]
    for word in ("reused", "restored in", "again would cost"):
        assert word in shown


def test_tour_names_every_module():
    package = ROOT / "kvnumba"
    tour = README.partition("## A tour of the files")[2].partition("## ")[0]
    for entry in package.iterdir():
        if entry.name.startswith(("_", ".")) or entry.suffix not in ("", ".py"):
            continue
        name = f"{entry.name}/" if entry.is_dir() else entry.name
        assert f"`{name}`" in tour, name
