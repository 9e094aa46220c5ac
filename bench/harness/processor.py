"""Which processor a number was measured on: what a name such as "AMD EPYC" leaves open."""

from __future__ import annotations

import platform
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
# What kernels use, as Linux names it: "avx512_vnni" multiplies 8-bit codes, "avx512vbmi" looks up
# bytes, "avx512_bf16" multiplies bfloat16; "asimd" and "sve" are ARM's.
_INSTRUCTIONS = (
    *("avx2", "avx512f", "avx512vbmi", "avx512_vnni", "avx512_bf16", "amx_tile"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def describe_processor(info: Path = _CPU_INFO) -> str:
    """Return its name, its generation and the vector instructions it has, from `/proc/cpuinfo`.

    A virtual machine's processor is often called by its brand alone; family and model, which
    number AMD's and Intel's generations, are then all that tells two of them apart. Without such a
    file it is what the platform calls it.
    """
    try:
        first, _, _ = info.read_text().partition("\n\n")
    except OSError:
        return platform.processor() or platform.machine()
    told = {}
    for line in first.splitlines():
        key, _, value = line.partition(":")
        told[key.strip()] = value.strip()
    name = told.get("model name") or platform.machine()
    numbers = (("family", "cpu family"), ("model", "model"))
    generation = [f"{what} {told[key]}" for what, key in numbers if key in told]
    flags = (told.get("flags") or told.get("Features") or "").split()
    has = [one for one in _INSTRUCTIONS if one in flags]
    return ", ".join([name, *generation, *([" ".join(has)] if has else [])])
