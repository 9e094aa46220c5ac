"""The output folder: written layer by layer beside the result, and renamed at the end.

A run that was stopped continues after the last finished layer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tgi_trio.errors import ConfigurationError, ModelLoadError, tell_reason
from tgi_trio.shard.quantising.job import Job
from tgi_trio.shard.quantising.solver import BITS, ZERO, Solved

_EACH: Final = 32 // BITS  # codes in a word
_NOT_COPIED: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Output:
    """The folder that is written."""

    def __init__(self, job: Job, text: str) -> None:
        """Begin, or continue where the same job was stopped.

        Raises ConfigurationError if the result exists, or the beginning of another job.
        """
        self._job = job
        if job.output.exists():
            raise ConfigurationError(f"{job.output} is there already: name another folder.")
        mark = job.staging / "job"
        digest = job.digest(text)
        if mark.is_file() and mark.read_text() != digest:
            raise ConfigurationError(
                f"{job.staging} holds the beginning of another job (other settings, weights or "
                "calibration text): remove it, or name another folder."
            )
        job.staging.mkdir(parents=True, exist_ok=True)
        _write_whole(mark, digest.encode())

    def finished(self, layer: int) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors of a finished layer, or None if it is not finished."""
        path = self._path(layer)
        return load_file(path) if path.is_file() else None

    def write(self, layer: int, solved: Mapping[str, Solved]) -> Mapping[str, torch.Tensor]:
        """Store the quantised matrices of a layer, by module; return them as tensors."""
        tensors: dict[str, torch.Tensor] = {}
        for module, each in solved.items():
            tensors |= {f"{module}.{name}": part for name, part in pack(each).items()}
        path = self._path(layer)
        unfinished = path.with_suffix(".part")
        save_file(tensors, unfinished, metadata={"format": "pt"})
        unfinished.rename(path)
        return tensors

    def finish(
        self, layers: int, plain: Mapping[str, torch.Tensor], config: Mapping[str, Any]
    ) -> None:
        """Write the rest, and rename the folder to its final name.

        `plain`: all unchanged tensors of the model, by name.
        """
        staging, outer = self._job.staging, "model-outer.safetensors"
        save_file(dict(plain), staging / outer, metadata={"format": "pt"})
        files = {name: outer for name in plain}
        size = (staging / outer).stat().st_size
        for layer in range(layers):
            path = self._path(layer)
            files |= dict.fromkeys(load_file(path), path.name)
            size += path.stat().st_size
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        (staging / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for path in sorted(self._job.model.iterdir()):
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, staging / path.name)
        description = self._describe()
        (staging / "config.json").write_text(
            json.dumps({**config, "quantization_config": description}, indent=2)
        )
        (staging / "quantize_config.json").write_text(json.dumps(description, indent=2))
        (staging / "job").unlink()
        try:
            os.rename(staging, self._job.output)
        except OSError as error:
            why = tell_reason(error, staging)
            raise ModelLoadError(f"{self._job.output} cannot be written: {why}") from error

    def _path(self, layer: int) -> Path:
        return self._job.staging / f"model-layer-{layer:04d}.safetensors"

    def _describe(self) -> dict[str, Any]:
        job = self._job
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": BITS,
            "group_size": job.group,
            "desc_act": job.by_activation,
            "sym": True,
            "damp_percent": job.damping,
            "lm_head": False,
            "true_sequential": False,
        }


def pack(solved: Solved) -> dict[str, torch.Tensor]:
    """Return the tensors of GPTQ's first version, which stores zero points minus one."""
    codes = solved.codes.numpy()
    outputs, groups = codes.shape[0], solved.scales.shape[1]
    zeros = np.full((groups, outputs), ZERO - 1, np.uint8)
    return {
        "qweight": torch.from_numpy(_words(np.ascontiguousarray(codes.T))),
        "qzeros": torch.from_numpy(np.ascontiguousarray(_words(zeros.T).T)),
        "scales": solved.scales.T.contiguous(),
        "g_idx": solved.groups,
    }


def unpack(tensors: Mapping[str, torch.Tensor], module: str) -> Solved:
    """Return the matrix that `pack` has stored."""
    words = tensors[f"{module}.qweight"].numpy().view(np.uint32)
    shifts = np.arange(0, 32, BITS, dtype=np.uint32)
    codes = (words[:, None] >> shifts[:, None]) & np.uint32((1 << BITS) - 1)
    flat = np.ascontiguousarray(codes.reshape(-1, words.shape[1]).T.astype(np.uint8))
    return Solved(
        torch.from_numpy(flat),
        tensors[f"{module}.scales"].T.contiguous(),
        tensors[f"{module}.g_idx"],
    )


def _words(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return int32 [n / 8, lines] of codes [n, lines], the first in the lowest bits."""
    grouped = codes.reshape(-1, _EACH, codes.shape[1]).astype(np.uint32)
    words = np.zeros((len(grouped), codes.shape[1]), np.uint32)
    for place in range(_EACH):
        words |= grouped[:, place] << np.uint32(BITS * place)
    return words.view(np.int32)


def _write_whole(path: Path, content: bytes) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content)
    unfinished.rename(path)
