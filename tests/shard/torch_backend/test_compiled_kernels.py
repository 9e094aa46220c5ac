"""Kernels compiled for devices that are not here: no decode spills, and a long prefill hardly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SPILLED = 96  # bytes of a thread, of prefills: smaller tiles that spill nothing take longer
TABLE = Path(__file__).parents[3] / "bench/results/compiled-kernels.json"
SMALLEST_SHARED = 99 << 10  # bytes a program may have on any device from compute capability 8.0 on
HOPPER_SHARED = 200 << 10  # on those that get tiles of "hopper", see `generation`


def is_decode(name: str) -> bool:
    if " ahead" in name:  # images of prompts
        return False
    return not name.startswith(
        (
            *("attend_tile prefill", "multiply_groups bf16 96", "multiply_codes bf16 128"),
            *("prepare_chunks", "run_chunks"),
            "multiply_several",  # whose tiles follow the device, as those of prefills do
        )
    )


def test_the_table_of_all_variants_holds() -> None:
    table = [json.loads(line) for line in TABLE.read_text().splitlines()]
    assert {entry["target"] for entry in table} == {80, 90} and len(table) > 60
    for entry in table:
        small = is_decode(entry["name"]) or entry["target"] == 80
        most = SMALLEST_SHARED if small else HOPPER_SHARED
        spilled = 0 if is_decode(entry["name"]) else SPILLED
        assert entry["shared"] <= most and entry["spilled"] <= spilled, entry


def test_the_table_has_every_variant() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tgi_trio.testing.compiled_kernels import TARGETS, list_variants

    table = [json.loads(line) for line in TABLE.read_text().splitlines()]
    for target, generation in TARGETS.items():
        names = sorted(entry["name"] for entry in table if entry["target"] == target)
        assert names == sorted(variant.name for variant in list_variants(generation))


def test_the_table_was_compiled_from_what_is_here() -> None:
    """Else `python -m tgi_trio.testing.compiled_kernels --table FILE` compiles what was not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from tgi_trio.testing.compiled_kernels import find_stale, read_table

    stale = find_stale(read_table(TABLE))
    assert not [(variant.name, target) for variant, target in stale]


SOURCE = """
import triton
import triton.language as tl

STEP = tl.constexpr(2)


@triton.jit
def add(x):
    return x + 1


@triton.jit
def kernel(out, SIZE: tl.constexpr):
    '''Write something.'''
    tl.store(out + STEP, add(SIZE))
"""
CHANGES = {
    "constant": ("constexpr(2)", "constexpr(3)"),
    "callee": ("x + 1", "x + 2"),
    "kernel": ("add(SIZE)", "add(-SIZE)"),
}


def test_a_fingerprint_tells_what_a_kernel_is_compiled_from(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from tgi_trio.testing.kernel_fingerprints import fingerprint
    from tgi_trio.testing.variant import F32, Variant

    def variant_of(name: str, source: str) -> Variant:
        (tmp_path / f"{name}.py").write_text(source)
        spec = spec_from_file_location(f"tgi_trio.{name}", tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module := module_from_spec(spec))
        return Variant("kernel", module.kernel, (F32,), {"SIZE": 4})

    own = variant_of("own", SOURCE)
    moved = SOURCE.replace("Write something", "Store").replace(
        "    return", "    # more\n\n    return"
    )
    assert fingerprint(variant_of("moved", moved)) == fingerprint(own)
    others = [variant_of(name, SOURCE.replace(*change)) for name, change in CHANGES.items()]
    others += [replace(own, warps=8), replace(own, constants={"SIZE": 8})]
    assert len({fingerprint(each) for each in (own, *others)}) == 1 + len(others)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", [80, 90])
def test_variants_compile_to_what_the_table_says(target: int) -> None:
    """Some of them, as each takes seconds. In a process of its own: others here interpret."""
    pytest.importorskip("triton", reason="Triton is not installed")
    argv = [sys.executable, "-m", "tgi_trio.testing.compiled_kernels", "--target", str(target)]
    argv += ["count_tokens", "attend_tile decode bf16 128 g4 divided", "merge_parts bf16 128"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    table = [json.loads(line) for line in TABLE.read_text().splitlines()]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    # Window, soft cap, biases, sinks, tokens seen ahead, chunks, 8 bits; gates of heads.
    assert len(made) == 12 and {entry["target"] for entry in made} == {target}
    for entry in made:
        (known,) = [e for e in table if all(e[k] == entry[k] for k in ("name", "target"))]
        assert entry["spilled"] == 0 and abs(entry["registers"] - known["registers"]) <= 16


ALIKE = """
import sys
from tgi_trio.testing.compiled_kernels import TARGETS, count_products
from tgi_trio.testing.invariant_variants import invariant_variants

target = int(sys.argv[1])
every = {each.name: each for each in invariant_variants(TARGETS[target])}
for name in ("multiply_any bf16 4096 4 parts", "attend_spans bf16 128",
             "attend_latent_spans bf16 512+64", "attend_entry_spans bf16 of 4"):
    shared, whole = (count_products(every[name + more], target) for more in (" divided", ""))
    assert shared and shared == whole, (name, shared, whole)
"""


@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("target", [80, 90])
def test_programs_that_share_work_multiply_as_those_that_do_not(target: int) -> None:
    """Where batch invariance is kept, by the same instructions: others may add up otherwise."""
    pytest.importorskip("triton", reason="Triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    argv = [sys.executable, "-c", ALIKE, str(target)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
