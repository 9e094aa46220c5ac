"""Quantises a model folder in the format that is asked for."""

from __future__ import annotations

from tgi_trio.model.config import read_config
from tgi_trio.model.quantisable import quantisable_spec
from tgi_trio.shard.quantising.calibration import read_text
from tgi_trio.shard.quantising.job import Job, Progress


def quantise_model(job: Job, progress: Progress) -> None:
    """Write `job.output`; `progress` wraps the layers or tensors.

    Raises ConfigurationError for invalid settings, ModelLoadError for a model that cannot be
    quantised.
    """
    config = read_config(job.model)
    spec = quantisable_spec(config, job.format)
    text = read_text(job.calibration_text)
    if job.format == "gptq":
        from tgi_trio.shard.quantising.gptq import write_gptq  # torch: two seconds

        write_gptq(job, config, spec, progress, text)
    else:
        from tgi_trio.shard.quantising.gguf_file import write_gguf

        kind = job.format.removeprefix("gguf:").upper()
        write_gguf(config, spec, job.output, kind, progress, text)
