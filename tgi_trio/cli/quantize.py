"""`quantize`: writes a model with weights of fewer bits, in a process with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import orjson

from tgi_trio.cli.options import QuantizeOptions
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import resolve_model


def run_quantize(options: QuantizeOptions) -> int:
    """Print what `quantize` returns; the exit code is 0. Raises as it does."""
    print(quantize(options))
    return 0


def quantize(options: QuantizeOptions) -> str:
    """Return the line to print; JSON with `--json-output`.

    Raises ModelLoadError if the model is not available or cannot be quantised; the reason has been
    printed by then.
    """
    folder = resolve_model(
        options.model_id,
        options.revision,
        cache_dir=options.huggingface_hub_cache,
        trust_remote_code=options.trust_remote_code,
        progress=not options.json_output,
        flag="MODEL",
    )
    output = options.output.absolute()
    _run(_job(options) | {"model": str(folder), "output": str(output)}, options.json_output)
    paths = output.iterdir() if output.is_dir() else [output]
    size = sum(path.stat().st_size for path in paths)
    line = f"{output} ({size / 1e6:.1f} MB): --model-id {output} serves it"
    if not options.json_output:
        return line
    return orjson.dumps({"message": line, "folder": str(output), "bytes": size}).decode()


def _job(options: QuantizeOptions) -> dict[str, Any]:
    """Return the options for the other process."""
    text = options.calibration_text
    return {
        "format": options.format,
        "group": options.groupsize,
        "damping": options.percdamp,
        "by_activation": options.act_order,
        "samples": options.samples,
        "sample_tokens": options.sample_tokens,
        "calibration_text": None if text is None else str(text.absolute()),
    }


def _run(job: dict[str, Any], quiet: bool) -> None:
    words = json.dumps(job | {"quiet": quiet})
    argv = [sys.executable, "-m", "tgi_trio.shard.quantising", words, str(os.getpid())]
    # A group of its own: Ctrl-C is for this process, which ends the other.
    done = subprocess.run(argv, check=False, process_group=0)
    if done.returncode:
        raise ModelLoadError("the model was not quantized, for the reason above")
