"""Words of flags that were renamed mean what they meant."""

from __future__ import annotations

from pathlib import Path

from tgi_trio.model.facts import ModelFacts
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve


def test_the_kernels_were_called_after_their_first_compiler() -> None:
    facts = ModelFacts(path=Path("/m"), model_type="llama", max_positions=2048)
    assert resolve(Options(cpu_backend="numba"), facts).cpu_backend == "kernels"
