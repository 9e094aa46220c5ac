"""What a folder of an adapter may hold, and what is refused by name; PEFT wrote the sound ones."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import read_adapter_config
from tgi_trio.model.adapters.files import WEIGHTS, read_adapter
from tgi_trio.model.adapters.needs import find_needs
from tgi_trio.model.adapters.sites import Site, head_site, map_adapter
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.base_weights import BaseWeights
from tgi_trio.shard.adapters.numbers import read_adapter_numbers

DATA = Path(__file__).parents[2] / "conversion" / "data"  # what PEFT and transformers wrote
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "llama" / "adapter", tmp_path / "adapter"))


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


def test_adapters_of_the_bare_model(adapter: Path) -> None:
    """PEFT on an AutoModel leaves out the first part of every name."""
    whole = load_file(adapter / WEIGHTS)
    short = {name.replace("model.model.layers", "model.layers"): v for name, v in whole.items()}
    assert short.keys() != whole.keys()
    save_file(short, adapter / WEIGHTS)
    assert Site(0, "qkv") in map_adapter(read_adapter(adapter), spec_of("llama")).linears


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": "yes"}, "use_dora 'yes'"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "some"}, "bias 'some'"),
        ({"target_parameters": 3, "megatron_config": {"a": 1}}, "megatron_config {'a': 1}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"something_of_tomorrow": 3}, "something_of_tomorrow 3"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(
    adapter: Path, changes: dict[str, Any], named: str
) -> None:
    edit(adapter, **changes, layer_replication=[1])
    with pytest.raises(ModelLoadError) as refused:
        read_adapter(adapter)
    assert named in str(refused.value) and "layer_replication [1]" in str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({f"{QUERY}.lora_A.weight": None}, "no lora_A of model.layers.0.self_attn.q_proj"),
        ({f"{QUERY}.lora_magnitude_vector": np.ones(4, np.float32)}, "lora_magnitude_vector'"),
        ({"base_model.model.lm_head.weight": np.ones((4, 4), np.float32)}, "lm_head.weight of"),
        ({"base_model.model.score.weight": np.ones((4, 4), np.float32)}, "score.weight'"),
        ({f"{QUERY}.lora_B.weight": np.ones((9, 3, 1), np.float32)}, f"{QUERY}.lora_B.weight of"),
        ({f"{QUERY}.lora_A.weight": np.ones((4, 8), np.int32)}, "is I32; served are F32"),
    ],
)
def test_tensors_that_do_not_fit(adapter: Path, tensors: dict[str, Any], text: str) -> None:
    change(adapter, **tensors)
    with pytest.raises(ModelLoadError) as refused:
        read(adapter)
    assert text in str(refused.value)


def test_magnitudes_and_biases_that_do_not_fit(adapter: Path) -> None:
    """Announced and missing, of another size, of what has none; those of a norm are refused."""
    edit(adapter, use_dora=True)
    with pytest.raises(ModelLoadError, match=r"no lora_magnitude_vector of .* only lora_A and"):
        read(adapter)
    ones = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): np.ones(len(b), np.float32)
        for name, b in load_file(adapter / WEIGHTS).items()
        if "lora_B" in name
    }
    change(adapter, **ones)
    read(adapter)
    name = f"{QUERY}.lora_magnitude_vector"
    change(adapter, **{name: np.ones(3, np.float32)})
    with pytest.raises(ModelLoadError, match=rf"{name} of .* is \[3\]; the model's outputs are"):
        read(adapter)
    edit(adapter, bias="all", use_dora=False)
    change(adapter, **dict.fromkeys(ones), **{f"{QUERY}.base_layer.bias": ones[name]})
    with pytest.raises(ModelLoadError, match=r"q_proj has none: the adapter is made for another"):
        read(adapter)
    norm = "base_model.model.model.layers.0.input_layernorm.bias"
    change(adapter, **{f"{QUERY}.base_layer.bias": None, norm: np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=rf"because of the tensor '{norm}'"):
        read(adapter)


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
    whole = {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
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
        ({f"{name}.lora_magnitude_vector": b[:, 0].copy()}, "of embeddings, only A and B"),
    ):
        edit(adapter, use_dora="magnitude" in next(iter(changes)))
        save_file(whole, adapter / WEIGHTS)
        change(adapter, **changes)
        with pytest.raises(ModelLoadError, match=text), BaseWeights(config, spec) as base:
            read_adapter_numbers(adapter, spec, every_unit, base, max_rank=2)


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


def test_another_base_a_large_rank_and_modules_that_are_not_there(adapter: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"rank \d+; at most 1 is served \(--max-lora-rank\)"):
        read(adapter, max_rank=1)
    name = f"{QUERY}.lora_A.weight"
    a = load_file(adapter / WEIGHTS)[name]
    change(adapter, **{name: np.ones((len(a), 99), np.float32)})
    with pytest.raises(ModelLoadError, match=r"lora_A of .*q_proj in .* the model's inputs are"):
        read(adapter)
    change(adapter, **{name: a})
    pair = {n.replace("layers.0", "layers.7"): v for n, v in load_file(adapter / WEIGHTS).items()}
    change(adapter, **pair)
    with pytest.raises(
        ModelLoadError,
        match=r"model\.layers\.7.* of llama models down_proj, ",
    ):
        read(adapter)


def test_rows_of_a_tied_head_beside_its_matrices(adapter: Path) -> None:
    """What replaces rows of an embedding does so in the head, and A and B are added to others."""
    spec = replace(spec_of("llama"), tied_head=True)
    rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    edit(adapter, trainable_token_indices={"embed_tokens": [1, 4]})
    head = {
        "base_model.model.lm_head.lora_A.weight": np.ones((2, spec.hidden_size), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.ones((spec.vocab_size, 2), np.float32),
    }
    change(adapter, **{rows: np.ones((2, spec.hidden_size), np.float32)})
    changes = map_adapter(read_adapter(adapter), spec)
    assert changes.embedded is not None and head_site(spec) in changes.linears
    change(adapter, **head)
    with pytest.raises(ModelLoadError, match=r"changes .*embed_tokens, which is not adapted"):
        map_adapter(read_adapter(adapter), spec)


def test_files_that_are_not_what_they_should_be(adapter: Path) -> None:
    weights = adapter / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes((1 << 30).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ModelLoadError, match="its header cannot be 1073741824 bytes long"):
        read(adapter)
    weights.write_bytes(whole[:-3])
    with pytest.raises(ModelLoadError, match="may be truncated"):
        read(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="a pickle, which may hold a program"):
        read(adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(ModelLoadError, match="but no adapter_model"):
        read(adapter)
    (adapter / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read(adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(ModelLoadError, match="no folder of an adapter"):
        read(adapter)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.dictionaries(
        st.sampled_from(
            "r lora_alpha rank_pattern alpha_pattern use_rslora peft_type bias init_lora_weights "
            "target_modules use_dora lora_bias layer_replication".split()
        ),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=5)
        | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.sampled_from(["q_proj", "(", ".*"]), st.integers() | st.none()),
    ),
    cut=st.integers(0, 400),
    garbage=st.binary(max_size=8),
)
def test_whatever_a_folder_holds_is_read_or_refused(
    adapter: Path, values: dict[str, Any], cut: int, garbage: bytes
) -> None:
    """Nothing but ModelLoadError comes of it."""
    config = DATA / "llama" / "adapter" / "adapter_config.json"
    (adapter / "adapter_config.json").write_text(
        json.dumps(json.loads(config.read_text()) | values)
    )
    whole = (DATA / "llama" / "adapter" / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(whole[:cut] + garbage + whole[cut + len(garbage) :])
    try:
        read(adapter)
    except ModelLoadError as error:
        assert str(adapter) in str(error)


@pytest.mark.parametrize(
    ("said", "release"),
    [
        ("0.18.1", (0, 18, 1)),
        ("0.19.2.dev0", (0, 19, 2)),
        ("1.0", (1, 0, 0)),
        (None, ()),
        ("main", ()),
        ("9" * 9999, ()),
        ([0, 18], ()),
    ],
)
def test_the_release_that_wrote_an_adapter(
    adapter: Path, said: Any, release: tuple[int, ...]
) -> None:
    edit(adapter, peft_version=said)
    assert read_adapter_config(adapter).peft_version == release


def test_adapters_of_parameters_are_not_merged(adapter: Path) -> None:
    """They are served beside others alone; what to do with one that is refused says so."""
    edit(adapter, target_parameters=["experts.down_proj"])
    config = read_adapter_config(adapter)
    assert not config.find_refused()
    assert config.find_refused(merged=True) == ["target_parameters ['experts.down_proj']"]
    assert "Merge it with PEFT" in config.advise()
