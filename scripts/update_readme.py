#!/usr/bin/env python3
"""Run the demo and put what it printed into the README, between its two markers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- demo: written by scripts/update_readme.py -->"
END = "<!-- end of demo -->"


def main() -> int:
    """Write README.md; return an exit code."""
    done = subprocess.run(
        ["bash", "scripts/demo.sh"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        print(f"the demo failed with exit code {done.returncode}", file=sys.stderr)
        return 1
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    block = f"{BEGIN}\n```text\n{done.stdout.strip()}\n```\n{END}"
    readme.write_text(before + block + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
