"""Other engines are asked as their public interfaces want it.

Fakes have parameters of `vllm.LLM`, `vllm.SamplingParams` and `sglang.Engine`, and refuse others.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench.device.peers import ENGINES, installed, step_seconds


@dataclass
class SamplingParams:
    """Of vLLM's, those that have to do with a length."""

    n: int = 1
    temperature: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    detokenize: bool = True


class LLM:
    def __init__(
        self, model: str, *, skip_tokenizer_init: bool = False, dtype: str = "auto"
    ) -> None:
        assert isinstance(model, str) and skip_tokenizer_init and dtype == "bfloat16"

    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: SamplingParams, /
    ) -> list[Any]:
        asked = sampling_params
        assert asked.ignore_eos and not asked.detokenize and asked.temperature == 0
        said = []
        for prompt in prompts:
            assert set(prompt) == {"prompt_token_ids"} and len(prompt["prompt_token_ids"]) == 64
            said.append(
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * shortened(asked))])
            )
        return said


def shortened(asked: SamplingParams) -> int:
    """Return how many tokens an engine says that may forget about `ignore_eos`."""
    assert asked.max_tokens is not None
    return min(asked.max_tokens, LIMIT["tokens"])


LIMIT = {"tokens": 1000}


class Engine:
    def __init__(
        self, *, model_path: str, skip_tokenizer_init: bool = False, dtype: str = "auto"
    ) -> None:
        assert isinstance(model_path, str) and skip_tokenizer_init and dtype == "bfloat16"

    def generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[list[int]] | None = None,
    ) -> list[dict[str, Any]]:
        assert prompt is None and input_ids is not None and sampling_params is not None
        asked = dict(sampling_params)
        assert asked.pop("ignore_eos") and asked.pop("temperature") == 0
        count = asked.pop("max_new_tokens")
        assert not asked
        return [{"output_ids": [7] * count, "meta_info": {"completion_tokens": count}}] * len(
            input_ids
        )


def module(name: str, **members: Any) -> ModuleType:
    found = ModuleType(name)
    found.__dict__.update(members, __spec__=SimpleNamespace(name=name))
    return found


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {
        "vllm": module("vllm", LLM=LLM, SamplingParams=SamplingParams),
        "sglang": module("sglang", Engine=Engine),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_is_asked_for_as_many_tokens_as_are_timed(name: str, tmp_path: Path) -> None:
    assert name in installed()
    generate = ENGINES[name](tmp_path)
    assert generate([[5] * 64, [6] * 64], 9) == [9, 9]
    assert isinstance(step_seconds(generate, 3), float)


def test_an_engine_that_says_less_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMIT, "tokens", 70)
    with pytest.raises(ValueError, match=r"2 rows were to get 72 tokens each, and got \[70, 70\]"):
        step_seconds(ENGINES["vllm"](tmp_path), 2)
