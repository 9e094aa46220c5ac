"""Layers of a checkpoint that draft further tokens: found by name, checked before a start."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.shard.speculation.mtp_support import mtp_checkpoint
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.serving import Serving
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import resolve
from tgi_trio.settings.served import with_model
from tgi_trio.start.checks import check_start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_checkpoint(tmp_path_factory.mktemp("model"), "glm4_moe")


def resolved(folder: Path, **options: object) -> Settings:
    return resolve(Options(**options), read_model_facts(folder))  # type: ignore[arg-type]


def check(settings: Settings) -> None:
    check_start(settings, read_config(settings.model_path))


def copy_without(folder: Path, copy: Path, part: str) -> Path:
    """Copy a checkpoint without tensors whose names have `part`."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (copy / name).write_bytes((folder / name).read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if part not in n}, copy / "model.safetensors")
    return copy


def test_they_draft_where_drafts_are_wanted_unless_the_text_is_named(folder: Path) -> None:
    assert resolved(folder).drafter is None
    settings = resolved(folder, speculate=2)
    assert (settings.drafter, settings.speculate) == ("mtp", 2)
    check(settings)
    assert resolved(folder, speculate=2, drafter="ngram").drafter == "ngram"
    assert resolved(folder, speculate=2, drafter="mtp").drafter == "mtp"


def test_a_repository_that_states_them_and_leaves_them_out(folder: Path, tmp_path: Path) -> None:
    without = copy_without(folder, tmp_path, "layers.2.")
    settings = resolved(without, speculate=2)
    assert settings.drafter == "ngram"
    check(settings)
    with pytest.raises(ConfigurationError, match="has no layers that draft further tokens, by na"):
        resolved(without, speculate=2, drafter="mtp")


def test_of_several_layers_each_drafts_once(tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path, "mimo_v2_flash", layers=3)
    assert resolved(folder, speculate=3).drafter == "mtp"
    with pytest.raises(ConfigurationError, match=r"`speculate` must be <= 3: .* Given: 4"):
        resolved(folder, speculate=4)
    assert resolved(folder, speculate=4, drafter="ngram").drafter == "ngram"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("layers.2.eh_proj", r"2\.eh_proj\.weight' .* is missing in .* as \[64, 128\]"),
        ("layers.2.mlp.experts.3.up", r"2\.mlp\.experts\.3\.up_proj\.weight' .* is missing"),
    ],
)
def test_what_lacks_parts_is_refused_by_name(
    part: str, says: str, folder: Path, tmp_path: Path
) -> None:
    settings = resolved(copy_without(folder, tmp_path, part), speculate=2)
    with pytest.raises(ModelLoadError, match=says):
        check(settings)
    check(resolved(tmp_path, speculate=2, drafter="ngram"))


@pytest.mark.parametrize(
    ("family", "part", "says"),
    [
        ("deepseek_v4", "hc_head_base", r"'mtp\.0\.hc_head_base' .* is missing in .* as \[4\]"),
        ("deepseek_v4", "e_proj", r"'mtp\.0\.e_proj\.weight' .* is missing in .* as \[64, 64\]"),
        ("step3p5", "shared_head", r"'model\.layers\.3\.transformer\.shared_head\.norm\.weight'"),
    ],
)
def test_parts_of_their_own_are_needed(family: str, part: str, says: str, tmp_path: Path) -> None:
    source = mtp_checkpoint(tmp_path / "whole", family)
    copy = tmp_path / "copy"
    copy.mkdir()
    without = copy_without(source, copy, f"mtp.0.{part}" if family == "deepseek_v4" else part)
    with pytest.raises(ModelLoadError, match=says):
        check(resolved(without, speculate=1))


def test_what_has_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    folder = mtp_checkpoint(tmp_path, "qwen4_exp_text")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.pre_fc_norm_hidden.weight"] = tensors["mtp.pre_fc_norm_hidden.weight"][:64].clone()
    save_file(tensors, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"has shape \[64\] in .* which needs it as \[192\]"):
        check(resolved(folder, speculate=2))


def test_a_drafter_that_nothing_asks_for_is_told(folder: Path) -> None:
    settings, said = with_model(
        resolved(folder, drafter="mtp"), Serving(path="decoder", backend="torch")
    )
    assert settings.drafter is None
    assert said == [
        "--drafter has no effect: --speculate says how many tokens are drafted ahead; by default "
        "none are"
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "eagle3"}, "`drafter` must be one of ngram, mtp; heads .* Given: eagle3"),
        (
            {"drafter": "mtp", "draft_model": Path("/heads")},
            "`drafter` mtp and the `draft_model` /heads cannot both draft",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, object], says: str, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        resolved(folder, speculate=2, **options)
