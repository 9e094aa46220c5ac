"""Configurations with one value that nobody would write: a spec, or a sentence why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import supported_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import FAMILIES
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.tensors import decoder_claims
from tgi_trio.testing.checkpoints import tiny_values
from tgi_trio.testing.tiny_families import ABSENT

ODD: tuple[Any, ...] = (None, "x", -1, 0, 3, 1.5, math.nan, True, [], [1], [None], {}, {"x": 1})


def changed(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values with one of them, or one within it, replaced."""
    for name, value in values.items():
        inner = changed(value) if isinstance(value, dict) else ()
        yield from ({**values, name: each} for each in (*ODD, *inner))


@pytest.mark.sampled(11)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whatever_a_value_is_there_is_a_spec_or_a_sentence(tmp_path: Path, family: str) -> None:
    tiny = {name: value for name, value in tiny_values(family).items() if value is not ABSENT}
    for values in changed(tiny):
        write_json(tmp_path, {**values, "model_type": family})
        try:
            spec = supported_spec(read_config(tmp_path))
        except ModelLoadError:
            continue
        if isinstance(spec, DecoderSpec):
            decoder_claims(spec)
