"""Whichever of two names config.json states a number by, which transformers' classes both take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.config import read_config
from tgi_trio.model.families.other_names import OTHER_NAMES
from tgi_trio.model.families.registry import FAMILIES, decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.testing.checkpoints import tiny_values
from tgi_trio.testing.tiny_families import ABSENT


def spec_of(folder: Path, values: dict[str, Any]) -> DecoderSpec | None:
    """Return the spec, but for numbers of positions: these have one reader for all families."""
    write_json(folder, values)
    spec = decoder_spec(read_config(folder))
    return None if spec is None else replace(spec, position_rows=0)


def names_of(family: str) -> dict[str, str]:
    """Return the other names that transformers' class takes, and those that it has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = family in CONFIG_MAPPING
    return dict(getattr(CONFIG_MAPPING[family], "attribute_map", {})) if known else {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("families", [sorted(OTHER_NAMES), sorted(FAMILIES)], ids=["ours", "all"])
def test_either_name_is_read(tmp_path: Path, families: list[str]) -> None:
    """The second finds names that are not in the table."""
    read: dict[str, list[str]] = {}
    for family in families:
        values = {name: each for name, each in tiny_values(family).items() if each is not ABSENT}
        for other, own in names_of(family).items():
            number = 0.5 if own == "norm_eps" else values.get(own, values.get(other))
            if number is None or other == "vocab_size":
                continue
            kept = {"num_experts_per_tok": 2, **values, "model_type": family}  # Mixtral's is needed
            kept = {name: each for name, each in kept.items() if name not in (own, other)}
            by_own, by_other = kept | {own: number}, kept | {other: number}
            assert spec_of(tmp_path, by_other) == spec_of(tmp_path, by_own), (family, other)
            read.setdefault(family, []).append(other)
    assert read.keys() >= OTHER_NAMES.keys()


def test_a_familys_own_name_counts_where_both_are(tmp_path: Path) -> None:
    values = {"model_type": "kimi_linear", **tiny_values("kimi_linear")}
    own = {"num_experts_per_token": 2}
    assert spec_of(tmp_path, values | own | {"num_experts_per_tok": 1}) == spec_of(
        tmp_path, values | own
    )
