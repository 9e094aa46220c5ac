"""Loads a model through transformers, which decides what of a checkpoint is which of its parts."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from safetensors import SafetensorError

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_unread, encoder_split_refusal, is_known
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.own_code import own_code, runnable_code
from tgi_trio.model.split import Portion
from tgi_trio.shard.torch_backend.fallback.division import read_division
from tgi_trio.shard.torch_backend.fallback.reading_parts import reading_class
from tgi_trio.shard.torch_backend.models.decoder import Ranks

# What from_pretrained raises for a folder that it cannot load.
_LOAD_ERRORS = (
    ValueError,
    KeyError,
    OSError,
    RuntimeError,
    ImportError,
    AttributeError,
    TypeError,
    SafetensorError,
)


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    trusted: bool,
    ranks: Ranks | None = None,
) -> Any:
    """Return the model of a folder; raises ModelLoadError if transformers cannot load it.

    `trusted`: the folder's own code may be run. With `ranks`, the model has this rank's parts, and
    its modules wait for the others'; also raises what `read_division` does.
    """
    from transformers import AutoConfig

    code = runnable_code(config) if trusted else None
    run = code is not None
    if code is not None:
        print(f"running code that comes with the model: {', '.join(code.files)}", file=sys.stderr)
    # Without trust_remote_code, transformers may ask on a terminal that is not there.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": run}
    try:
        known = AutoConfig.from_pretrained(config.folder, **options)
        loads: Any = _choose_class(known)
        if ranks is not None:
            loads = _part_class(loads, known, dtype, run, ranks)
            options = {"local_files_only": True, "config": known}
        loaded = loads.from_pretrained(
            config.folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except ModelLoadError:
        raise
    except Exception as error:
        if not run and not isinstance(error, _LOAD_ERRORS):
            raise
        needed = own_code(config) is not None and not is_known(config.model_type)
        raise _cannot_load(config, error, needed, run) from error
    model, report = loaded
    if report["missing_keys"]:  # transformers would go on with random numbers
        name = min(report["missing_keys"])
        raise ModelLoadError(f"Tensor {name!r} is missing from the checkpoint {config.folder}.")
    check_unread(config, sorted(report["unexpected_keys"]))
    if ranks is not None and type(model) is loads:
        raise ModelLoadError(
            "This version of transformers reads checkpoints in a way that is not known here, so "
            f"model type {config.model_type!r} is not split over shards; use --num-shard 1."
        )
    return model.to(device).eval()


def _part_class(auto: Any, known: Any, dtype: torch.dtype, run: bool, ranks: Ranks) -> type[Any]:
    """Return the class that loads this rank's parts, and say how much of the model they are.

    `auto`: the class of transformers for any type.
    """
    if known.is_encoder_decoder:
        raise ModelLoadError(encoder_split_refusal(known.model_type))
    with torch.device("meta"):  # for the shapes of the whole
        blank = auto.from_config(known, dtype=dtype, trust_remote_code=run)
    division = read_division(blank, Portion(ranks.rank, ranks.size))
    share = division.numbers(blank) / sum(p.numel() for p in blank.parameters())
    print(f"this rank holds {share:.0%} of the model's weights", file=sys.stderr)
    return reading_class(blank, division, ranks)


def _choose_class(config: Any) -> Any:
    """Return the class of transformers that loads models with this config.

    Types that exist only as models of text and images have a table of their own.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    first = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kinds = (first, AutoModelForImageTextToText)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), first)


def _cannot_load(
    config: ModelConfig, error: Exception, needs_code: bool, run: bool
) -> ModelLoadError:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else "no message"
    if run:
        traceback.print_exception(error, file=sys.stderr)
        return ModelLoadError(
            f"The code that comes with {config.folder} cannot load its model: "
            f"{type(error).__name__}: {reason}"
        )
    if needs_code:
        reason = "it brings code of its own, which --trust-remote-code runs"
    return ModelLoadError(
        f"Model type {config.model_type!r} is not one of ours, and transformers cannot load "
        f"{config.folder} as a model that generates text: {reason}"
    )
