"""Adapters through everything that a server does to a sequence, against transformers with PEFT.

One batch of rows with eight adapters, two of them with DoRA, and with none, in chunks, preempted
and taken up again, with drafts of the next tokens, one of them under a grammar, and the shard
killed in the middle of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.system.adapter_support import in_float32, write
from tests.system.client import post
from tests.system.server import serving

pytestmark = pytest.mark.system

Oracle: TypeAlias = Callable[[str, str | None, bool, list[int]], list[int]]

NEW = 128
PROMPTS = (
    "The old harbour was quiet. The old harbour was quiet. The old harbour was",  # drafts pay
    "In the morning",
)
WITHOUT_E = "[^eE]*"
RANKS = {"a": 4, "b": 1, "c": 2, "d": 3, "e": 8, "f": 5, "g": 6, "h": 7}  # by adapter
WITH_DORA = ("b", "e")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_float32(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        write(root / name, seed, rank, dora=name in WITH_DORA)
        for seed, (name, rank) in enumerate(RANKS.items())
    ]


@pytest.fixture(scope="module")
def oracle(base: Path, folders: list[Path]) -> Oracle:
    """Return what chooses greedily behind every token of an answer, with an adapter or none.

    An answer that it agrees with from the first token to the last is the one that it would give.
    """
    peft = pytest.importorskip("peft", reason="PEFT is the oracle; it is in the test extra")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    model = peft.PeftModel.from_pretrained(plain, folders[0], adapter_name="a")
    for folder in folders[1:]:
        model.load_adapter(folder, adapter_name=folder.name)
    model.eval()
    texts = [str(tokenizer.decode([i])) for i in range(plain.config.vocab_size)]
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    banned = [i for i, text in enumerate(texts) if "e" in text.lower() or i in marks]

    @torch.no_grad()
    def choose(prompt: str, adapter: str | None, without_e: bool, answer: list[int]) -> list[int]:
        """`without_e`: tokens with that letter are not chosen."""
        known = tokenizer(prompt).input_ids
        ids = torch.tensor([[*known, *answer[:-1]]])
        if adapter:
            model.set_adapter(adapter)
        with nullcontext() if adapter else model.disable_adapter():
            scores = model(input_ids=ids).logits[0, len(known) - 1 :]
        if without_e:
            scores[:, banned] = -torch.inf
        scores[:, plain.config.eos_token_id] = -torch.inf  # `min_new_tokens`
        return list(map(int, scores.argmax(-1)))

    return choose


def test_whatever_happens_to_a_sequence(base: Path, folders: list[Path], oracle: Oracle) -> None:
    named = ",".join(f"{folder.name}={folder}" for folder in folders)
    flags = ["--model-id", str(base), "--dtype", "float32", "--lora-adapters", named]
    flags += ["--speculate", "3", "--max-batch-prefill-tokens", "48"]
    # Two of the long prompt are admitted together, with 6 of 15 blocks each, and need 10 to end:
    # neither ends before the other has given way.
    flags += ["--max-batch-total-tokens", "240", "--max-total-tokens", "160"]
    flags += ["--stall-timeout", "600"]
    asked = [(PROMPTS[0], adapter, False) for adapter in (None, *RANKS)]
    asked += [(PROMPTS[1], None, False), (PROMPTS[1], "a", True)]
    with serving(*flags) as server, ThreadPoolExecutor(len(asked)) as pool:

        def generate(prompt: str, adapter: str | None, without_e: bool) -> Any:
            grammar = {"type": "regex", "value": WITHOUT_E} if without_e else None
            parameters: dict[str, Any] = {
                "max_new_tokens": NEW,
                "min_new_tokens": NEW,
                "details": True,
            }
            parameters |= {"adapter_id": adapter, "grammar": grammar}
            body = {"inputs": prompt, "parameters": parameters}
            return post(f"{server.url}/generate", json=body).json()

        with server.held():
            waiting = [pool.submit(generate, *each) for each in asked[:2]]
            server.wait_metric("tgi_request_accepted", 2)
            waiting += [pool.submit(generate, *each) for each in asked[2:]]
            server.wait_metric("tgi_request_accepted", len(asked))
        server.wait_metric("tgi_batch_preemptions", 1)
        os.kill(server.shards()[0], signal.SIGKILL)
        answers = [each.result() for each in waiting]
        server.wait_metric("tgi_shard_restarts", 1)
        metrics = server.metrics()
    for each, answer in zip(asked, answers, strict=True):
        ids = [token["id"] for token in answer["details"]["tokens"]]
        assert len(ids) == NEW
        assert ids == oracle(*each, ids), each
    assert metrics["tgi_shard_restarts"] == 1
    assert metrics["tgi_batch_draft_tokens"] > 0
    assert len({answer["generated_text"] for answer in answers}) == len(answers)
