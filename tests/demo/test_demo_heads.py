"""The heads that come with the embedded model: what they draft is right, and changes no token."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from tests.shard.speculation.heads_support import answer
from tgi_trio.demo import MODEL_ID, heads_path, model_path
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.speculators.recognise import base_of_heads, count_heads
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.speculation.payoff import Payoff
from tools.demo.entries import load_heldout
from tools.demo.markup import ASSISTANT, BEGIN, END, USER

DRAFTED = 3
QUESTIONS = [question for _, question in load_heldout()[::56]]  # six
ASKED = [SamplingParameters(), SamplingParameters(sample=True, seed=5, temperature=0.7)]
MAX_BYTES = 3_000_000


def test_they_draft_for_the_embedded_model_and_are_small() -> None:
    assert base_of_heads(heads_path()) == MODEL_ID
    assert count_heads(heads_path()) >= DRAFTED
    assert sum(file.stat().st_size for file in heads_path().iterdir()) < MAX_BYTES
    config = json.loads((heads_path() / "config.json").read_text())
    assert (
        config["hidden_size"]
        == json.loads((model_path() / "config.json").read_text())["hidden_size"]
    )


@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_most_drafts_are_right_and_no_token_changes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether drafting pays on a machine is another matter, and depends on what else it does.
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    settings = ShardSettings(
        model_path=model_path(), draft_model=heads_path(), cpu_backend=backend, cpu_threads=1
    )
    runner = load_runner(settings)
    for sampling in ASKED:
        tokens = steps = 0
        for question in QUESTIONS:
            prompt = tokenizer.encode(BEGIN + USER + question + END + ASSISTANT).ids
            plain = answer(runner, [prompt], [sampling], 80)
            with_heads = answer(runner, [prompt], [sampling], 80, drafter=runner.drafter(DRAFTED))
            assert with_heads.tokens == plain.tokens
            tokens += len(plain.tokens[0])
            steps += with_heads.steps
        assert tokens >= 120
        assert tokens / steps > 2.4  # 3 and more, but for the step of the prompt
