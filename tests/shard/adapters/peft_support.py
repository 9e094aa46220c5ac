"""Adapters that PEFT writes, and PEFT computing with them: the oracle of all that serves them."""

from __future__ import annotations

import json
from collections.abc import Sequence as ListLike
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import GreedyRecorder, advance, generated
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import AnnouncingHost
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner

_COMPRESSED = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
# Linears around latents by family: with queries that are compressed or not, with an index, which
# has some of its own, with gates behind that, and without experts.
AROUND_LATENTS = {
    "deepseek_v2": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "deepseek_v3": _COMPRESSED,
    "deepseek_v32": _COMPRESSED,
    "hy_v4": [*_COMPRESSED, "self_attn.gate_proj"],
    "minicpm3": [*_COMPRESSED, "gate_proj", "down_proj"],
}

# Families whose linears leave a factor of their input to what follows them, with such linears.
SCALED_INPUTS = {
    "falcon_h1": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "minicpm3": ["lm_head"],
}

SAVED_ROWS = [3, 9, 40]  # what is trained of a matrix that is saved whole
# Rows of tokens that prompts have, by family: of an embedding that is the head as well and is
# scaled, of an embedding alone, and of both; also of matrices that are saved whole, of embeddings
# with A and B or with DoRA, of heads with a bias, which PEFT leaves out where it replaces rows, and
# of tied heads that are changed apart from the embedding, beside it, or as it is.
TOKEN_ROWS: dict[str, list[dict[str, Any]]] = {
    "gemma2": [{"trainable_token_indices": [7, 3, 40]}, {"trainable_token_indices": [11]}],
    "starcoder2": [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]},
    ],
    "gemma": [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 3},
        {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
    ],
    "gpt2": [
        {"target_modules": ["wte", "lm_head", "c_attn"], "r": 3},
        {"target_modules": ["wte", "c_attn"], "use_dora": True},
    ],
    "phi": [
        {"trainable_token_indices": {"lm_head": [60, 2, 31]}, "target_modules": ["q_proj"]},
    ],
    "gptj": [{"modules_to_save": ["lm_head"], "target_modules": ["v_proj"]}],
    "gemma3_text": [
        {"trainable_token_indices": [7], "target_modules": ["lm_head", "q_proj"], "r": 3}
    ],
    "granite": [{"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [40]}}],
    "cohere": [{"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}],
    "mistral": [{"modules_to_save": ["embed_tokens", "lm_head"]}, {}],
    "llama": [
        {"trainable_token_indices": [7, 3, 40], "target_modules": ["q_proj"]},
        {"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [60, 2, 31]}},
    ],
}


# Of adapters for which the vocabulary was cut to the tokenizer's, which PEFT writes without a word
# in the configuration: with nothing else, with matrices that were trained, and with A and B.
CUT, PADDED = 500, 520  # of 512 tokens
CUT_VOCABULARIES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["v_proj"]},
    {"target_modules": ["embed_tokens", "lm_head"], "r": 3},
]


def write_adapter(base: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """Have PEFT write an adapter with random matrices, magnitudes and biases; return `folder`.

    `config`: fields of LoraConfig; `target_modules` are all linears where it does not say. With
    `tokens`, which is none, the vocabulary is made so large before.
    """
    peft = pytest.importorskip("peft", reason="PEFT is the oracle; it is in the test extra")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if (tokens := config.pop("tokens", None)) is not None:
        model.resize_token_embeddings(tokens)
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:  # PEFT has put the norms of the base there
                parameter.mul_(1 + 0.3 * noise)
            elif "modules_to_save" in name:
                parameter[SAVED_ROWS] += noise[SAVED_ROWS] * 0.3
            elif parameter.requires_grad:
                inputs = parameter.shape[1] if parameter.ndim > 1 else 8
                parameter.copy_(noise * 0.5 / inputs**0.5)
    adapted.save_pretrained(folder)
    if tokens is not None:  # trainers save it beside
        save_tokenizer(folder, {"<unk>": 0, "a": 511, "<pad>": 512}, padding="<pad>")
    return folder


def save_tokenizer(folder: Path, tokens: dict[str, int], padding: str) -> None:
    """Write the files of a tokenizer that has these tokens; one of them is to pad with."""
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "<unk>"}
    added = [{"id": tokens[padding], "content": padding, "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": padding}))


class PeftGolden(Golden):
    """A base and its adapters, float32, as transformers and PEFT compute them."""

    def __init__(self, base: Path, adapters: ListLike[Path], tokens: int | None = None) -> None:
        """`tokens`: the vocabulary that the adapters were made for, if it is another."""
        peft = pytest.importorskip("peft", reason="PEFT is the oracle")
        super().__init__(base)
        if tokens is not None:
            self.model.resize_token_embeddings(tokens)
        self.adapted = peft.PeftModel.from_pretrained(self.model, adapters[0], adapter_name="1")
        for number, folder in enumerate(adapters[1:], start=2):
            self.adapted.load_adapter(folder, adapter_name=str(number))
        self.adapted.eval()

    @torch.no_grad()
    def logits_of(self, adapter: int, prompt: ListLike[int], tokens: ListLike[int]) -> torch.Tensor:
        """Return the logits that `tokens` were chosen from, with adapter 1, 2, ... or with none."""
        ids = torch.tensor([[*prompt, *tokens]])
        if adapter:
            self.adapted.set_adapter(str(adapter))
            out = self.adapted(input_ids=ids)
        else:
            with self.adapted.disable_adapter():
                out = self.adapted(input_ids=ids)
        logits: torch.Tensor = out.logits
        return logits[0, len(prompt) - 1 : -1].float()


def install(runner: Runner, number: int, folder: Path) -> None:
    host = runner.adapters
    assert host is not None
    order = AdapterOrder(number, folder)
    if isinstance(host, AnnouncingHost):
        host.announce(order)
    host.install(number, host.load(order))


def adapted(rows: list[ShardSequence], adapters: list[int]) -> list[ShardSequence]:
    for row, number in zip(rows, adapters, strict=True):
        row.sampling = replace(row.sampling, adapter=number)
    return rows


def check(
    golden: PeftGolden, recorder: GreedyRecorder, row: ShardSequence, tolerance: float = 1e-4
) -> None:
    prompt, tokens = row.token_ids[: row.prompt_length].tolist(), generated(row)
    expected = golden.logits_of(row.sampling.adapter, prompt, tokens)
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(recorder.logits(row.id), expected, atol=tolerance, rtol=0.0)


def check_cut(golden: PeftGolden, recorder: GreedyRecorder, row: ShardSequence) -> None:
    """Compare the logits behind a prompt of the tokens that both vocabularies have.

    The next token may be one of the others.
    """
    prompt = row.token_ids[: row.prompt_length].tolist()
    expected = golden.logits_of(row.sampling.adapter, prompt, [0])
    found = recorder.logits(row.id)
    both = min(found.shape[1], expected.shape[1])
    assert both < max(found.shape[1], expected.shape[1])
    torch.testing.assert_close(found[:, :both], expected[:, :both], atol=1e-4, rtol=0.0)


def check_prompts(golden: PeftGolden, runner: Runner, rows: list[ShardSequence]) -> None:
    """Prefill the rows, which ask for their prompts' log-probabilities, and compare those."""
    for row in rows:
        row.sampling = replace(row.sampling, prompt_logprobs=True)
    results = advance(runner, rows, [row.length for row in rows])
    for row, result in zip(rows, results, strict=True):
        prompt = row.token_ids[: row.prompt_length].tolist()
        logprobs = golden.logits_of(row.sampling.adapter, prompt[:1], prompt[1:]).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        found = torch.tensor(result.prompt_logprobs[1:])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)
