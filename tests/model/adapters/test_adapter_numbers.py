"""An adapter's numbers, of low rank and saved whole; PEFT wrote the sound ones."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model.adapters.adapter_folders import (
    DATA,
    QUERY,
    change,
    edit,
    read,
    read_numbers,
    spec_of,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import WEIGHTS, read_adapter
from tgi_trio.model.adapters.needs import find_needs
from tgi_trio.model.adapters.sites import head_site, map_adapter
from tgi_trio.model.config import read_config
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.numbers import read_adapter_numbers


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_sums_are_those_of_peft(model: str) -> None:
    """W + B A of every site is what `merge_and_unload` wrote."""
    sites = read_numbers(DATA / model / "adapter", model)
    base, merged = (
        load_file(DATA / model / name) for name in ("base/model.safetensors", "merged.safetensors")
    )
    mapped = map_adapter(read_adapter(DATA / model / "adapter"), spec_of(model)).linears
    assert sites.keys() == mapped.keys()
    for site, parts in sites.items():
        wanted = np.concatenate(
            [
                (merged[cut.matrix.name] - base[cut.matrix.name]).T[cut.rows, *cut.columns]
                if cut.matrix.transposed
                else (merged[cut.matrix.name] - base[cut.matrix.name])[cut.rows, *cut.columns]
                for cut in mapped[site].linear.cuts(every_unit)
            ]
        )
        found = np.zeros_like(wanted)
        for part in parts:
            found[part.start : part.start + len(part.b)] += part.b @ part.a
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_a_head_beside_whose_matrices_lies_a_copy(adapter: Path) -> None:
    """PEFT writes the base's own; one that was trained, or has more rows, is refused."""
    head, rank = "base_model.model.lm_head", 3
    own = load_file(DATA / "llama" / "base" / "model.safetensors")["lm_head.weight"]
    rows, columns = own.shape
    pair = {
        f"{head}.lora_A.weight": np.ones((rank, columns), np.float32),
        f"{head}.lora_B.weight": np.ones((rows, rank), np.float32),
    }
    edit(adapter, r=rank, rank_pattern={})
    save_file({**pair, f"{head}.base_layer.weight": own}, adapter / WEIGHTS)
    assert read_numbers(adapter, "llama").keys() == {head_site(spec_of("llama"))}
    change(adapter, **{f"{head}.base_layer.weight": own + 1})
    with pytest.raises(ModelLoadError, match=r"base_layer\.weight of .* is not the model's"):
        read(adapter)
    more = np.concatenate((own, own[:1]))
    change(adapter, **{f"{head}.base_layer.weight": more})
    with pytest.raises(ModelLoadError, match=r"the model's outputs are 24"):
        read(adapter)


def test_matrices_that_are_saved_whole(adapter: Path) -> None:
    """Rows that differ beyond their dtype are kept; too many, too large ones and norms are not."""
    base = load_file(DATA / "llama" / "base" / "model.safetensors")
    saved, head = base["lm_head.weight"].astype(np.float16), "base_model.model.lm_head.weight"
    edit(adapter, modules_to_save=["lm_head", "norm"])
    save_file({head: saved}, adapter / WEIGHTS)
    assert read_numbers(adapter, "llama") == {head_site(spec_of("llama")): ()}
    saved[[2, 9]] += np.float16(0.5)
    save_file({head: saved}, adapter / WEIGHTS)
    ((part,),) = read_numbers(adapter, "llama", 2).values()
    assert np.flatnonzero(part.b.any(axis=1)).tolist() == [2, 9]
    np.testing.assert_allclose(part.a, 0.5, atol=1e-2)
    needs = find_needs([adapter], spec_of("llama"), 7, grows=False)
    assert needs.rank == 7 and needs.scope.words() == ("head",)
    for matrix, text in (
        (saved + np.float16(1), r"weight of .* differs from the model's in more than 2 rows"),
        (np.concatenate((saved, saved[:1])), r"has 25 tokens, and the model 24"),
        (saved[:, 1:], "the adapter is made for another base"),
    ):
        save_file({head: matrix.copy()}, adapter / WEIGHTS)
        with pytest.raises(ModelLoadError, match=text):
            read_numbers(adapter, "llama", 2)
    save_file({head: np.concatenate((saved, saved[:1]))}, adapter / WEIGHTS)
    for values, text in (({}, r"\(`<pad>`\)"), ({"pad_token": "<pad>"}, "")):
        added = {"added_tokens": [{"id": 24, "content": "<pad>"}]}
        (adapter / "tokenizer.json").write_text(json.dumps(added))
        (adapter / "tokenizer_config.json").write_text(json.dumps(values))
        with pytest.raises(ModelLoadError, match=text) if text else nullcontext():
            ((part,),) = read_numbers(adapter, "llama", 2).values()
            assert part.b.shape == (24, 2)
    save_file({"base_model.model.model.norm.weight": saved[0]}, adapter / WEIGHTS)
    with pytest.raises(ModelLoadError, match=r"changes model\.norm, which is not adapted here"):
        read(adapter)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_numbers_of_64_bits_are_read_as_32(tmp_path: Path, model: str) -> None:
    folder = Path(shutil.copytree(DATA / model / "adapter", tmp_path / "wide"))
    before = read_numbers(folder, model)
    change(folder, **{k: v.astype(np.float64) for k, v in load_file(folder / WEIGHTS).items()})
    for site, parts in read_numbers(folder, model).items():
        for part, other in zip(parts, before[site], strict=True):
            np.testing.assert_array_equal(part.a, other.a)
            np.testing.assert_array_equal(part.b, other.b)
    change(folder, **{k: v * 1e300 for k, v in load_file(folder / WEIGHTS).items()})
    with pytest.raises(ModelLoadError, match="infinite"):
        read_numbers(folder, model)


def test_a_matrix_of_64_bits_that_is_saved_whole(adapter: Path) -> None:
    base = load_file(DATA / "llama" / "base" / "model.safetensors")["lm_head.weight"]
    edit(adapter, modules_to_save=["lm_head"])
    wide = base.astype(np.float64)
    wide[[2, 9]] += 0.5
    save_file({"base_model.model.lm_head.weight": wide}, adapter / WEIGHTS)
    ((part,),) = read_numbers(adapter, "llama", 2).values()
    assert np.flatnonzero(part.b.any(axis=1)).tolist() == [2, 9]


def test_embeddings_with_matrices_of_their_own(adapter: Path) -> None:
    """What PEFT writes beside A and B is the base's; all that does not fit is refused by name."""
    spec, name = spec_of("llama"), "base_model.model.model.embed_tokens"
    own = load_file(DATA / "llama" / "base" / "model.safetensors")["model.embed_tokens.weight"]
    (tokens, width), rank = own.shape, 2
    a, b = np.ones((rank, tokens), np.float32), np.ones((width, rank), np.float32)
    whole: dict[str, Any] = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
    whole[f"{name}.base_layer.weight"] = own
    edit(adapter, r=rank, lora_alpha=6, use_rslora=False, rank_pattern={}, alpha_pattern={})
    save_file(whole, adapter / WEIGHTS)
    config = read_config(DATA / "llama" / "base")
    with BaseWeights(config, spec) as base:
        found = read_adapter_numbers(adapter, spec, every_unit, base, max_rank=2).looked_up
    assert found is not None and found.a.shape == (tokens, rank)
    np.testing.assert_array_equal(found.b, 3 * b)
    assert find_needs([adapter], spec, 7, grows=False).scope.words() == ("lookups",)
    for changes, text in (
        ({f"{name}.base_layer.weight": own + 1}, r"base_layer\.weight of .* is not the model's"),
        ({f"{name}.lora_embedding_A": np.tile(a, 2)}, r"has 48 tokens, and the model 24"),
        ({f"{name}.lora_embedding_B": b.T.copy()}, r"does not fit the rank 2"),
        ({f"{name}.lora_embedding_B": None}, r"no lora_embedding_B of model\.embed_tokens"),
    ):
        save_file(whole, adapter / WEIGHTS)
        change(adapter, **changes)
        with pytest.raises(ModelLoadError, match=text), BaseWeights(config, spec) as base:
            read_adapter_numbers(adapter, spec, every_unit, base, max_rank=2)


def test_magnitudes_of_an_embedding(adapter: Path) -> None:
    """One for each place of a row, of all tokens; so the adapter has as many as the model."""
    spec, name = spec_of("llama"), "base_model.model.model.embed_tokens"
    own = load_file(DATA / "llama" / "base" / "model.safetensors")["model.embed_tokens.weight"]
    (tokens, width), rank = own.shape, 2
    a, b = np.ones((rank, tokens), np.float32), np.ones((width, rank), np.float32)
    magnitudes = np.arange(width, dtype=np.float32) + 1
    whole: dict[str, Any] = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
    whole[f"{name}.lora_magnitude_vector"] = magnitudes
    edit(adapter, r=rank, lora_alpha=6, use_dora=True, use_rslora=False, rank_pattern={})
    edit(adapter, alpha_pattern={})
    config = read_config(DATA / "llama" / "base")

    def load() -> Any:
        with BaseWeights(config, spec) as base:
            return read_adapter_numbers(adapter, spec, every_unit, base, max_rank=2).looked_up

    save_file(whole, adapter / WEIGHTS)
    found = load()
    factors = magnitudes / np.linalg.norm(own + 3 * (b @ a).T, axis=0)
    np.testing.assert_allclose(found.gains, factors - 1, rtol=1e-5)
    np.testing.assert_allclose(found.b, 3 * b * factors[:, None], rtol=1e-5)
    needs = find_needs([adapter], spec, 7, grows=False)
    assert set(needs.scope.words()) == {"gains", "lookups"}
    for changes, text in (
        (
            {f"{name}.lora_magnitude_vector": magnitudes[1:]},
            r"magnitude_vector of .* is \[\d+\]; the",
        ),
        ({f"{name}.lora_magnitude_vector": magnitudes * np.inf}, "infinite or none"),
        ({f"{name}.lora_magnitude_vector": None}, "holds no lora_magnitude_vector of"),
        ({f"{name}.lora_embedding_A": a[:, 1:].copy()}, "since its magnitudes are of all of them"),
    ):
        save_file(whole, adapter / WEIGHTS)
        change(adapter, **changes)
        with pytest.raises(ModelLoadError, match=text):
            load()


def test_numbers_that_are_none(adapter: Path) -> None:
    name = f"{QUERY}.lora_B.weight"
    for wrong in (np.nan, np.inf, 3e38):
        values = load_file(adapter / WEIGHTS)[name].copy()
        values[-1, -1] = wrong
        change(adapter, **{name: values})
        if np.isfinite(wrong):
            edit(adapter, lora_alpha=1000, alpha_pattern={})
        with pytest.raises(ModelLoadError, match=f"{name} of "):
            read(adapter)
