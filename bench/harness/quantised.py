"""Checkpoints of 4 bits in the shapes of real models, as GPTQ and AWQ lay them out, for benchmarks.

    python -m bench.harness.quantised M gptq /tmp/model-m-gptq

The shape's random weights are rounded to the nearest code, which is all that speed depends on; that
other tools' files are read right is shown by tests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.harness.checkpoints import SHAPES, make

if TYPE_CHECKING:
    import torch

_ZERO, _LARGEST, _NIBBLES = 8, 7, 8  # the code of 0, the largest behind it, codes in an int32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # which nibble of an int32 an output has

Packed = dict[str, "torch.Tensor"]


def pack_gptq(codes: torch.Tensor, scales: torch.Tensor, group: int) -> Packed:
    """Return GPTQ's tensors of codes [in, out] and scales [groups, out], float16."""
    import torch

    inputs, outputs = codes.shape
    places = torch.arange(_NIBBLES, dtype=torch.int64)
    words = (codes.reshape(-1, _NIBBLES, outputs).long() << (4 * places)[:, None]).sum(1)
    return {
        "qweight": _as_int32(words),
        # One less than the zero point: the older of the two forms, which all tools write.
        "qzeros": _full_of(_ZERO - 1, scales.shape[0], outputs // _NIBBLES),
        "scales": scales,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // group,
    }


def pack_awq(codes: torch.Tensor, scales: torch.Tensor, _: int) -> Packed:
    """Return AWQ's tensors of codes [in, out] and scales [groups, out], float16."""
    import torch

    inputs, outputs = codes.shape
    places = torch.tensor(_AWQ_PLACES, dtype=torch.int64)
    words = (codes.reshape(inputs, -1, _NIBBLES).long() << (4 * places)).sum(2)
    return {
        "qweight": _as_int32(words),
        "qzeros": _full_of(_ZERO, scales.shape[0], outputs // _NIBBLES),
        "scales": scales,
    }


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """Return the lower 32 bits of int64."""
    import torch

    wrapped = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return wrapped.to(torch.int32).contiguous()


def _full_of(code: int, *size: int) -> torch.Tensor:
    import torch

    word = sum(code << (4 * place) for place in range(_NIBBLES))
    return _as_int32(torch.full(size, word, dtype=torch.int64))


# How a format lays codes out, and what config.json says of it beside its bits and groups.
FORMATS: Final[dict[str, tuple[Callable[..., Packed], dict[str, Any]]]] = {
    "gptq": (pack_gptq, {"desc_act": False, "sym": True, "checkpoint_format": "gptq"}),
    "awq": (pack_awq, {"zero_point": True, "version": "gemm"}),
}


def round_to_codes(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes int32 [in, out] and scales float16 [groups, out] of weights [out, in]."""
    import torch

    outputs, inputs = weight.shape
    grouped = weight.float().t().reshape(inputs // group, group, outputs)
    scales = (grouped.abs().amax(1) / _LARGEST).to(torch.float16)
    codes = torch.round(grouped / scales.float()[:, None]) + _ZERO
    return codes.clamp(0, 15).int().reshape(inputs, outputs), scales


def group_size(shape: str) -> int:
    """Return the largest group that divides the inputs of all matrices, at most 128."""
    sizes = SHAPES[shape]["hidden_size"], SHAPES[shape]["intermediate_size"]
    return next(group for group in (128, 64, 32) if not any(size % group for size in sizes))


def quantise(shape: str, form: str, plain: Path, folder: Path) -> Path:
    """Write the shape in a format, a key of FORMATS, to `folder` unless it is there.

    `plain`: where its bfloat16 checkpoint is, or is to be made. Returns `folder`.
    """
    from safetensors.torch import load_file, save_file

    pack, said = FORMATS[form]
    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    make(shape, plain)
    folder.mkdir(parents=True, exist_ok=True)
    group, tensors = group_size(shape), Packed()
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed = pack(*round_to_codes(tensor, group), group)
        tensors |= {name.removesuffix("weight") + part: each for part, each in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in plain.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": form, "bits": 4, "group_size": group, **said}
    done.write_text(json.dumps(config, indent=2))
    return folder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.harness.quantised", description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    plain = options.folder.with_name(f"{options.folder.name}-plain")
    folder = quantise(options.shape, options.format, plain, options.folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: shape {options.shape} as {options.format}, {size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
