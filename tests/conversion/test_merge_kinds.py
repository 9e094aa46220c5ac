"""Adapters of every kind, merged, compute what PEFT computes with them beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tgi_trio.conversion.lora import merge_adapter
from tgi_trio.errors import ModelLoadError

peft = pytest.importorskip("peft", reason="PEFT is the oracle; it is in the test extra")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, int] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
IDS = torch.arange(24).reshape(2, 12)
SAVED = {"modules_to_save": ["embed_tokens", "lm_head"]}
DORA = {"use_dora": True, "use_rslora": True, "target_modules": "all-linear"}


def silent(line: str) -> None:
    """Nobody wants to know."""


def make_base(folder: Path, *, tied: bool = False, kind: str = "llama") -> Path:
    """Write a base with random weights and biases."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=64
        )
    elif kind == "phi":
        config = transformers.PhiConfig(**{**SIZES, "num_key_value_heads": 2})
    else:
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied, attention_bias=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, *, more_tokens: int = 0, **config: Any) -> Path:
    """Have PEFT write an adapter of random tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if more_tokens:
        model.resize_token_embeddings(model.config.vocab_size + more_tokens)
    values = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "down_proj"], **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    adapted.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits_beside(base: Path, adapter: Path, more_tokens: int = 0) -> torch.Tensor:
    """Return what PEFT computes with the adapter beside the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    if more_tokens:
        model.resize_token_embeddings(model.config.vocab_size + more_tokens)
    found: torch.Tensor = peft.PeftModel.from_pretrained(model, adapter).eval()(IDS).logits
    return found


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(DORA, id="DoRA"),
        pytest.param({"use_dora": True, "target_modules": ["embed_tokens"]}, id="DoRA, embedding"),
        pytest.param({"target_modules": ["q_proj", "embed_tokens"]}, id="embedding"),
        pytest.param({"target_modules": ["q_proj", "lm_head"]}, id="head"),
        pytest.param({"target_modules": ["embed_tokens", "lm_head"]}, id="embedding and head"),
        pytest.param({"modules_to_save": ["embed_tokens"]}, id="embedding saved"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="head saved"),
        pytest.param({"modules_to_save": ["lm_head", "embed_tokens"]}, id="both saved"),
        pytest.param({"modules_to_save": ["input_layernorm", "mlp"], "target_modules": ["q_proj"]},
                     id="norms and blocks saved"),
        pytest.param({"trainable_token_indices": [3, 1, 17]}, id="rows of the embedding"),
        pytest.param({"trainable_token_indices": [3, 1, 17],
                      "target_modules": ["q_proj", "lm_head"]}, id="rows, and a head"),
        pytest.param({"bias": "all"}, id="biases"),
        pytest.param({"bias": "lora_only"}, id="biases of adapted linears"),
        pytest.param({"lora_bias": True, "target_modules": ["q_proj"]}, id="biases that are added"),
    ],
)  # fmt: skip
def test_the_merged_model_computes_the_same(
    tmp_path: Path, config: dict[str, Any], tied: bool
) -> None:
    base = make_base(tmp_path / "base", tied=tied)
    adapter = make_adapter(base, tmp_path / "adapter", **config)
    wanted = logits_beside(base, adapter)
    merge_adapter(adapter, base, tmp_path / "out", silent)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, logits_of(base), atol=1e-3)


@pytest.mark.parametrize("outer", [[], ["wte", "lm_head"]], ids=["layers", "all"])
def test_matrices_that_are_stored_transposed(tmp_path: Path, outer: list[str]) -> None:
    """Beside those of a head PEFT writes the base's embedding, under this family's name as well."""
    base = make_base(tmp_path / "base", kind="gpt2")
    adapter = make_adapter(
        base, tmp_path / "adapter", use_dora=True, fan_in_fan_out=True,
        target_modules=["c_attn", "c_proj", *outer],
    )  # fmt: skip
    merge_adapter(adapter, base, tmp_path / "out", silent)
    wanted = logits_beside(base, adapter)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", ["none", "lora_only"])
def test_a_head_with_a_bias_some_of_whose_rows_are_replaced(tmp_path: Path, bias: str) -> None:
    """PEFT computes it without."""
    base = make_base(tmp_path / "base", kind="phi")
    rows = {"embed_tokens": [3, 17], "lm_head": [5, 1, 30]}
    targets: dict[str, Any] = {"target_modules": ["q_proj"], "bias": bias}
    adapter = make_adapter(base, tmp_path / "adapter", trainable_token_indices=rows, **targets)
    merge_adapter(adapter, base, tmp_path / "out", silent)
    wanted = logits_beside(base, adapter)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)
    assert not load_file(tmp_path / "out" / "model.safetensors")["lm_head.bias"].any()


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_bias_that_is_added_where_the_base_has_none(tmp_path: Path, tied: bool) -> None:
    base = make_base(tmp_path / "base", tied=tied)
    for module in ("lm_head", "down_proj"):
        added: dict[str, Any] = {"target_modules": [module], "lora_bias": True}
        adapter = make_adapter(base, tmp_path / module, **added)
        with pytest.raises(ModelLoadError, match=rf"a bias to .*{module} .*the base has none"):
            merge_adapter(adapter, base, tmp_path / "out", silent)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("config", [{}, SAVED], ids=["frozen", "saved"])
@pytest.mark.parametrize("more", [3, -3], ids=["grown", "cut"])
def test_another_number_of_tokens(
    tmp_path: Path, tied: bool, more: int, config: dict[str, Any]
) -> None:
    """The size changes in the configuration, and the tokenizer is the one that knows them."""
    base = make_base(tmp_path / "base", tied=tied)
    (base / "tokenizer.json").write_text('{"of": "the base"}')
    special = {"bos_token": "<s>", "added_tokens_decoder": {"3": {"content": "of the base"}}}
    (base / "tokenizer_config.json").write_text(json.dumps(special))
    adapter = make_adapter(base, tmp_path / "adapter", more_tokens=more, **config)
    wanted = logits_beside(base, adapter, more_tokens=more)
    (adapter / "tokenizer.json").write_text('{"of": "the adapter"}')
    merge_adapter(adapter, base, tmp_path / "out", silent)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is (tied and not config)
    assert written["vocab_size"] == 40 + more
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"of": "the adapter"}'
    left = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert left == {"bos_token": "<s>"}


def test_a_tied_head_that_is_trained_with_its_embedding_stays_tied(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tied=True)
    adapter = make_adapter(
        base, tmp_path / "adapter", target_modules=["embed_tokens"], ensure_weight_tying=True
    )
    merge_adapter(adapter, base, tmp_path / "out", silent)
    wanted = logits_beside(base, adapter)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_a_head_of_its_own_is_in_the_index(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tied=True)
    transformers.AutoModelForCausalLM.from_pretrained(base).save_pretrained(
        base, max_shard_size="8KB"
    )
    (base / "model.safetensors").unlink(missing_ok=True)
    adapter = make_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    merge_adapter(adapter, base, tmp_path / "out", silent)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    where = index["weight_map"]
    assert where["lm_head.weight"] == where["model.embed_tokens.weight"]
    wanted = logits_beside(base, adapter)
    torch.testing.assert_close(logits_of(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)


def edit(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_the_configuration_and_the_tensors_say_is_the_same(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", use_dora=True)
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    magnitude = next(name for name in whole if name.endswith("magnitude_vector"))

    def refused(why: str) -> None:
        with pytest.raises(ModelLoadError, match=why):
            merge_adapter(adapter, base, tmp_path / "out", silent)
        assert not (tmp_path / "out").exists()

    save_file({name: each for name, each in whole.items() if name != magnitude}, path)
    refused("use_dora of .* is True, and of .* the adapter has .*lora_A")
    save_file({**whole, magnitude: torch.ones(5)}, path)
    refused(r"what the adapter has for it \[5\]: it is made for another base")
    save_file(whole, path)
    edit(adapter, modules_to_save=["lm_head"])
    refused("modules_to_save of .* names lm_head, and the adapter has no tensor of it")
    edit(adapter, modules_to_save="lm_head")
    refused("modules_to_save of .* is no list of names")
    edit(adapter, modules_to_save=None, use_dora=False)
    refused(f"because of the tensor '{magnitude}'")
    edit(adapter, use_dora=True, lora_bias=True)
    refused("lora_bias of .* is True")
    edit(adapter, lora_bias=False, trainable_token_indices=[1])
    rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    save_file({**whole, rows: torch.ones(2, 16)}, path)
    refused(r"model.embed_tokens.weight of the base is \[40, 16\]")
    edit(adapter, trainable_token_indices={"embed_tokens": [1, -2]})
    refused("trainable_token_indices of .* has no list of numbers for model.embed_tokens")
    edit(adapter, trainable_token_indices=[1, 40])
    refused("made for another base")


def test_an_embedding_alone_cannot_grow(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", more_tokens=3)
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    save_file({name: each for name, each in whole.items() if "lm_head" not in name}, path)
    with pytest.raises(ModelLoadError, match=r"leaves 43 tokens in .* and 40 in lm_head.weight"):
        merge_adapter(adapter, base, tmp_path / "out", silent)
