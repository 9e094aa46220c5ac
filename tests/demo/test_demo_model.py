"""The embedded model as a user meets it, computed by transformers in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.threads import one_torch_thread
from tgi_trio.demo import MODEL_ID, model_path
from tools.demo.entries import load_tools
from tools.demo.evaluate import (
    NO_TOOL_EACH,
    Result,
    call_results,
    follow_up_results,
    heldout_results,
    result_results,
)

MAX_BYTES = 8_000_000
MAX_NEW_TOKENS = 120
END = "<|end|>"


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    with one_torch_thread():
        yield AutoModelForCausalLM.from_pretrained(model_path())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path())


def continue_ids(model: Any, ids: Any) -> list[int]:
    import torch

    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
    return list(out[0, ids.shape[1] :].tolist())


def ask(model: Any, tokenizer: Any, *turns: str, system: str = "") -> str:
    """Ask one turn after the other; return the last answer with its end token."""
    messages = [{"role": "system", "content": system}] if system else []
    answer = ""
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        answer = tokenizer.decode(continue_ids(model, ids))
        messages.append({"role": "assistant", "content": answer.removesuffix(END)})
    return answer


def config() -> dict[str, Any]:
    return dict(json.loads((model_path() / "config.json").read_text()))


@pytest.mark.parametrize(
    ("question", "phrase"),
    [
        ("What is continuous batching?", "join the running batch"),
        ("explain continuous batching", "join the running batch"),
        ("what's continuous batching", "join the running batch"),
        ("What is the KV cache?", "keys and values"),
        ("Which port does the server use?", "3000"),
        ("How do I start the server?", "python -m tgi_trio"),
        ("who are you", "demo model"),
        ("What is the price of a house in Paris?", "only know about this server"),
    ],
)
def test_it_answers_and_stops_by_itself(
    model: Any, tokenizer: Any, question: str, phrase: str
) -> None:
    answer = ask(model, tokenizer, question)
    assert phrase in answer
    assert answer.endswith(END)


def test_a_system_message_does_not_confuse_it(model: Any, tokenizer: Any) -> None:
    answer = ask(
        model, tokenizer, "What is continuous batching?", system="You are a helpful assistant."
    )
    assert "join the running batch" in answer
    assert answer.endswith(END)


def test_it_follows_a_conversation(model: Any, tokenizer: Any) -> None:
    more = ask(model, tokenizer, "What is continuous batching?", "Tell me more.")
    assert "static batching" in more
    assert "welcome" in ask(model, tokenizer, "What is prefill?", "Thanks!")


def test_it_continues_plain_text(model: Any, tokenizer: Any) -> None:
    ids = tokenizer("Continuous batching", return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    assert "new requests join the running batch" in tokenizer.decode(continue_ids(model, ids))


def count_right(results: Sequence[Result]) -> int:
    return sum(result.right for result in results)


def test_most_heldout_paraphrases_are_answered(model: Any, tokenizer: Any) -> None:
    assert count_right(heldout_results(model, tokenizer)) >= 300


def test_it_has_more_to_say(model: Any, tokenizer: Any) -> None:
    results = follow_up_results(model, tokenizer, "Tell me more.")
    assert count_right(results) >= 0.8 * len(results)


def test_a_thought_does_not_spoil_the_answer(model: Any, tokenizer: Any) -> None:
    results = heldout_results(model, tokenizer, thinks=True, each=NO_TOOL_EACH)
    assert count_right(results) >= 0.8 * len(results)


def test_tools_that_are_not_needed_are_left_alone(model: Any, tokenizer: Any) -> None:
    results = heldout_results(model, tokenizer, tools=load_tools()[:3], each=NO_TOOL_EACH)
    assert count_right(results) >= 0.8 * len(results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("thinks", [False, True])
def test_it_calls_tools_by_names_it_has_never_been_asked_with(
    model: Any, tokenizer: Any, thinks: bool
) -> None:
    results = call_results(model, tokenizer, thinks=thinks)
    assert count_right(results) >= 0.5 * len(results)


def test_it_says_what_a_tool_found(model: Any, tokenizer: Any) -> None:
    results = result_results(model, tokenizer)
    assert count_right(results) >= 0.75 * len(results)


def test_the_folder_is_small() -> None:
    assert (model_path() / "model.safetensors").stat().st_size <= MAX_BYTES


def test_the_config_suits_the_server(model: Any) -> None:
    import torch

    assert config()["architectures"] == ["LlamaForCausalLM"]
    assert config()["dtype"] == "float32"
    assert config()["head_dim"] % 32 == 0
    assert config()["hidden_size"] % 32 == 0
    assert model.dtype == torch.float32


def test_the_ends_are_declared(tokenizer: Any) -> None:
    generation = json.loads((model_path() / "generation_config.json").read_text())
    ends = tokenizer.convert_tokens_to_ids([END, "<|endoftext|>"])
    assert generation["eos_token_id"] == ends
    assert tokenizer.eos_token == END


def test_the_chat_template_and_the_tokenizer_agree(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, tgi_trio.demo as demo; assert demo.model_path().is_dir();"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_model_id_is_stable() -> None:
    assert MODEL_ID == "tgi-trio/demo"
