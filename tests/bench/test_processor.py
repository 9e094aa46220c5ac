"""A benchmark's results name the processor, so that two of one brand are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import stats
from bench.harness.processor import describe_processor

EPYC = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni

processor\t: 1
model name\t: the second core
"""
NEOVERSE = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (EPYC, "AMD EPYC, family 26, model 2, avx2 avx512f avx512_vnni"),
        (NEOVERSE, "aarch64, asimd asimddp i8mm"),
    ],
)
def test_name_generation_and_instructions_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, said: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    info = tmp_path / "cpuinfo"
    info.write_text(told)
    assert describe_processor(info) == said


def test_without_the_file_it_is_what_the_platform_says(tmp_path: Path) -> None:
    assert describe_processor(tmp_path / "missing")


def test_every_result_names_it() -> None:
    assert stats.machine()["processor"] == describe_processor()
