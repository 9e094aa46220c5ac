"""A folder of an adapter that PEFT wrote, to be changed, and what is read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from tgi_trio.model.adapters.files import WEIGHTS
from tgi_trio.model.adapters.sites import Site
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.numbers import read_adapter_numbers

DATA = Path(__file__).parents[2] / "conversion" / "data"  # what PEFT and transformers wrote
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def spec_of(model: str) -> DecoderSpec:
    spec = decoder_spec(read_config(DATA / model / "base"))
    assert spec is not None
    return spec


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change(folder: Path, **tensors: Any) -> None:
    """Replace tensors by name; None takes one away."""
    whole = {**load_file(folder / WEIGHTS), **tensors}
    save_file({name: value for name, value in whole.items() if value is not None}, folder / WEIGHTS)


def read_numbers(folder: Path, model: str, max_rank: int = 64) -> dict[Site, Any]:
    """Return the numbers of an adapter of one of the models in `DATA`."""
    config, spec = read_config(DATA / model / "base"), spec_of(model)
    with BaseWeights(config, spec) as base:
        return dict(read_adapter_numbers(folder, spec, every_unit, base, max_rank=max_rank).sites)


def read(folder: Path, max_rank: int = 64) -> None:
    read_numbers(folder, "llama", max_rank)
