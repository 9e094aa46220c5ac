"""`make test-avx2` makes of any x86 a processor without AVX512, for everybody who computes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEN = """
import torch
from tgi_trio.shard.cpu_backend.instructions import has, has_dot
print(torch.backends.cpu.get_cpu_capability())
print(torch.ops.mkldnn._is_mkldnn_bf16_supported(), has("avx512f"), has_dot(), has("avx2"))
"""


def hold() -> dict[str, str]:
    """Return the variables of the Makefile's AVX2."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("AVX2 := "))
    return dict(word.split("=", 1) for word in line.partition(":=")[2].split())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is x86's")
def test_nobody_sees_avx512() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **hold()},
    )
    assert done.stdout.split() == ["AVX2", "False", "False", "False", "True"]


def test_the_document_names_the_same_kernels() -> None:
    """And so does the worker of `bench.model --peers avx2`."""
    features = hold()["KERNEL_CPU_FEATURES"]
    for path in ("docs/cpu-backend/exactness.md", "bench/model/worker.py"):
        assert features in (ROOT / path).read_text()
