"""What a folder of an adapter may hold, and what is refused by name; PEFT wrote the sound ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.model.adapters.adapter_folders import DATA, QUERY, change, edit, read, spec_of
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import read_adapter_config
from tgi_trio.model.adapters.files import WEIGHTS, read_adapter
from tgi_trio.model.adapters.sites import Site, head_site, map_adapter


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


def test_heads_that_are_to_stay_tied_are_changed_in_both(adapter: Path) -> None:
    """Where PEFT has written one of the two, nothing says that the other is changed as well."""
    spec = replace(spec_of("llama"), tied_head=True)
    name, width = "base_model.model.model.embed_tokens.lora_embedding", spec.hidden_size
    edit(adapter, ensure_weight_tying=True, r=2, rank_pattern={})
    for each in load_file(adapter / WEIGHTS):
        change(adapter, **{each: None})
    own = {
        f"{name}_A": np.ones((2, spec.vocab_size), np.float32),
        f"{name}_B": np.ones((width, 2), np.float32),
    }
    change(adapter, **own)
    with pytest.raises(ModelLoadError, match="tensors of the embedding alone, not of what is tied"):
        map_adapter(read_adapter(adapter), spec)
    head = {
        "base_model.model.lm_head.lora_A.weight": np.ones((2, width), np.float32),
        "base_model.model.lm_head.lora_B.weight": np.ones((spec.vocab_size, 2), np.float32),
    }
    change(adapter, **head)
    assert head_site(spec) in map_adapter(read_adapter(adapter), spec).linears
    change(adapter, **dict.fromkeys(own))
    with pytest.raises(ModelLoadError, match="tensors of the head alone"):
        map_adapter(read_adapter(adapter), spec)


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
    """What replaces rows of an embedding does so in the head, to which A and B are added."""
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
    changed = map_adapter(read_adapter(adapter), spec).linears[head_site(spec)]
    assert any(changed.pairs) and changed.rows is not None and changed.rank == 4
    with pytest.raises(ModelLoadError, match=r"has the rank 4; at most 3 is served"):
        map_adapter(read_adapter(adapter), spec, 3)
    edit(adapter, lora_bias=True)
    for name, b in load_file(adapter / WEIGHTS).items():
        if name.endswith("lora_B.weight"):
            change(adapter, **{name.replace("weight", "bias"): np.ones(len(b), np.float32)})
    with pytest.raises(ModelLoadError, match=r"biases of lm_head: of a head some of whose rows"):
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
@example(values={"peft_type": []}, cut=0, garbage=b"")
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


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "PROMPT_TUNING"},
        {"peft_type": "PREFIX_TUNING"},
        {"peft_type": "XLORA"},
        {"alora_invocation_tokens": [1, 2]},
    ],
)
def test_nobody_is_told_to_merge_what_depends_on_the_prompt(
    adapter: Path, changes: dict[str, Any]
) -> None:
    edit(adapter, **changes)
    config = read_adapter_config(adapter)
    assert config.find_refused() and config.find_refused(merged=True)
    assert "nothing can merge it" in config.advise()
