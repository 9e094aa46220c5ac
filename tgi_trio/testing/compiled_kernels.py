"""Compiles our Triton kernels for devices that need not be here: registers, spills, shared memory.

    python -m tgi_trio.testing.compiled_kernels            # a table: JSON, line by line
    python -m tgi_trio.testing.compiled_kernels merge_parts "gate bf16"  # of some kernels
    python -m tgi_trio.testing.compiled_kernels --target 90   # for one compute capability
    python -m tgi_trio.testing.compiled_kernels --table FILE  # compile what FILE has not, or of
                                                              # other sources, and write it anew

Triton can compile for a device that is not there. The variants are those of `kernel_variants.py`,
which include attention, choices and mixtures, of `code_variants.py`, `trellis_variants.py`,
`adapter_variants.py` and `invariant_variants.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tgi_trio.shard.torch_backend.torch_device import Generation
from tgi_trio.testing.adapter_variants import adapter_variants
from tgi_trio.testing.code_variants import code_variants
from tgi_trio.testing.invariant_variants import invariant_variants
from tgi_trio.testing.kernel_fingerprints import fingerprint
from tgi_trio.testing.kernel_variants import variants
from tgi_trio.testing.trellis_variants import trellis_variants
from tgi_trio.testing.variant import EVEN, TYPES, Variant

TARGETS: Final[dict[int, Generation]] = {80: "ampere", 90: "hopper"}  # by compute capability


@dataclass(frozen=True)
class Compiled:
    """The resources that a compiled kernel takes."""

    name: str
    target: int  # compute capability
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    shared: int  # bytes of a program
    fingerprint: str  # of what it was compiled from


def compile_variant(variant: Variant, target: int) -> Compiled:
    """Compile a variant for a compute capability; raises what the compiler does."""
    import triton

    made = _compile(variant, target)
    registers, spilled = _resources(made.asm["ptx"], target, Path(triton.__file__).parent)
    shared, own = made.metadata.shared, fingerprint(variant)
    return Compiled(variant.name, target, registers, spilled, shared, own)


def count_products(variant: Variant, target: int) -> Counter[str]:
    """Return the tensor cores' instructions in a variant, and how many there are of each."""
    ptx = _compile(variant, target).asm["ptx"]
    return Counter(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[\w.]*", ptx))


def _compile(variant: Variant, target: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {
        name: kind.removesuffix(EVEN) if isinstance(kind, str) else f"*{TYPES[kind]}"
        for name, kind in zip(names, variant.arguments, strict=False)
    }
    signature |= dict.fromkeys(variant.constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(variant.arguments)
        if not isinstance(kind, str) or kind.endswith(EVEN)
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    if variant.registers is not None:
        options["maxnreg"] = variant.registers
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def _resources(ptx: str, target: int, triton: Path) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread, as the assembler reports them."""
    architecture = "sm_90a" if target == 90 else f"sm_{target}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        argv = [str(triton / "backends/nvidia/bin/ptxas"), "-v", f"-arch={architecture}"]
        argv += [str(source), "-o", str(source.with_suffix(".cubin"))]
        report = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    if registers is None or spilled is None:
        raise ValueError(f"the assembler says something else than it used to: {report}")
    return int(registers[1]), int(spilled[1])


def list_variants(generation: Generation) -> Iterator[Variant]:
    """Yield every variant that is launched on devices of a generation."""
    yield from variants(generation)
    yield from code_variants(generation)
    yield from trellis_variants(generation)
    yield from adapter_variants()
    yield from invariant_variants(generation)


def read_table(table: Path) -> list[Compiled]:
    """Return the rows of a table."""
    return [Compiled(**json.loads(line)) for line in table.read_text().splitlines()]


def find_stale(rows: Iterable[Compiled]) -> list[tuple[Variant, int]]:
    """Return the variants, and their targets, that were not compiled from what is here now."""
    known = {(row.name, row.target): row.fingerprint for row in rows}
    return [
        (variant, target)
        for target, generation in TARGETS.items()
        for variant in list_variants(generation)
        if known.get((variant.name, target)) != fingerprint(variant)
    ]


def renew_table(table: Path) -> None:
    """Compile what a table has not, or of other sources, print it, and write the table anew.

    Rows of variants that there are no more are left out.
    """
    rows = {(row.name, row.target): row for row in read_table(table)}
    for variant, target in find_stale(rows.values()):
        own = rows[variant.name, target] = compile_variant(variant, target)
        print(json.dumps(asdict(own)), flush=True)
    kept = (
        rows[variant.name, target]
        for target, generation in TARGETS.items()
        for variant in list_variants(generation)
    )
    table.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in kept))


def main() -> None:
    """Print the resources of all variants, or of those that are asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of variants' names")
    parser.add_argument("--target", type=int, choices=TARGETS, help="a compute capability, of all")
    parser.add_argument("--table", type=Path, help="a table to renew")
    asked = parser.parse_args()
    if asked.table is not None:
        renew_table(asked.table)
        return
    wanted = tuple(asked.names)
    for target in TARGETS if asked.target is None else [asked.target]:
        for variant in list_variants(TARGETS[target]):
            if variant.name.startswith(wanted):
                print(json.dumps(asdict(compile_variant(variant, target))), flush=True)


if __name__ == "__main__":
    main()
