"""Writes a model folder with 4-bit weights by GPTQ."""

from __future__ import annotations

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig, read_values
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.checkpoint.lookup import Checkpoint, open_checkpoint
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.quantising.calibration import read_samples
from tgi_trio.shard.quantising.job import Job, Progress
from tgi_trio.shard.quantising.layers import Inputs, LayerWalk, Replaced
from tgi_trio.shard.quantising.output import Output, unpack
from tgi_trio.shard.quantising.solver import Solved, solve

_UNIT = 32  # rows and columns of a quantised matrix are multiples of it, since codes fill words


def write_gptq(
    job: Job, config: ModelConfig, spec: DecoderSpec, progress: Progress, text: str
) -> None:
    """Write the folder `job.output`; `text` shows which inputs matter.

    Raises ConfigurationError for invalid settings, ModelLoadError for a model that cannot be
    quantised.
    """
    length = min(job.sample_tokens, config.max_positions or job.sample_tokens)
    samples = read_samples(text, job.model / "tokenizer.json", job.samples, length)
    output = Output(job, text)
    with (
        open_checkpoint(config, spec.names.base, writable=True) as checkpoint,
        torch.inference_mode(),
    ):
        replaced = Replaced(checkpoint)
        walk = LayerWalk(spec, replaced, samples, torch.float32)
        stored: set[str] = set()
        for index in progress(range(len(spec.layers))):
            tensors = output.finished(index)
            if tensors is None:
                tensors = output.write(index, _solve_layer(job, checkpoint, walk.watch(index)))
            modules = {name.removesuffix(".qweight") for name in tensors if "qweight" in name}
            replaced.numbers = {
                f"{module}.weight": unpack(tensors, module).weight().numpy() for module in modules
            }
            stored |= {f"{module}.weight" for module in modules}
            walk.advance(index)
        output.finish(
            len(spec.layers), _plain_tensors(config, stored), read_values(config.folder) or {}
        )


def _solve_layer(job: Job, checkpoint: Checkpoint, watched: list[Inputs]) -> dict[str, Solved]:
    """Return the matrices of a layer that GPTQ can store, quantised, by module."""
    found: dict[str, Solved] = {}
    for inputs in watched:
        for matrix in inputs.matrices:
            if matrix.rows % _UNIT or matrix.columns % _UNIT or not _is_weight(matrix):
                continue
            weight = _read(checkpoint, matrix)
            found[matrix.name.removesuffix(".weight")] = solve(
                weight,
                inputs.gram.mean(matrix.columns),
                group=job.group,
                damping=job.damping,
                by_activation=job.by_activation,
            )
    return found


def _is_weight(matrix: MatrixRef) -> bool:
    return matrix.name.endswith(".weight")


def _read(checkpoint: Checkpoint, matrix: MatrixRef) -> torch.Tensor:
    """Return float32 [rows, columns]; raises ModelLoadError for weights that are not finite."""
    stored = checkpoint.matrix(
        matrix.name, (matrix.rows, matrix.columns), transposed=matrix.transposed
    )
    weight = torch.from_numpy(to_float32(stored.dequantised()))
    if not weight.isfinite().all():
        raise ModelLoadError(f"Tensor {matrix.name!r} holds a weight that is no number.")
    return weight


def _plain_tensors(config: ModelConfig, stored: set[str]) -> dict[str, torch.Tensor]:
    """Return all other tensors of a checkpoint, unchanged."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    files = SafetensorsFiles(config.folder)
    found = {}
    for name in sorted(files.names):
        tensor = files.tensor(name)
        bare = {each.split(".", 1)[-1] for each in stored}  # names without the base
        if name not in stored and name not in bare and tensor.dtype in kinds:
            raw = torch.from_numpy(tensor.take()).view(kinds[tensor.dtype])
            found[name] = raw.reshape(tensor.shape)
    files.close()
    return found
