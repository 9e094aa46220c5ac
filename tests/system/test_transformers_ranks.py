"""Servers whose ranks divide a model that runs through transformers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm_start import run_warm
from tests.system.client import generate, post
from tests.system.golden import reference, tokenize
from tests.system.server import serving, wait_gone
from tgi_trio.testing.checkpoints import make_checkpoint

NEW_TOKENS = 24
pytestmark = pytest.mark.system

PROMPTS = ["Continuous batching is", "A ring buffer", "Tell me a story about a router"]
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_layer_types": ["dense", "sparse"],
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
    "sliding_window": 24,
}


@pytest.mark.parametrize(("family", "changes"), [("apertus1p5_text", {}), ("beam", MIXTURE)])
def test_a_server_of_two_ranks_says_what_transformers_says_and_starts_again(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path, family, **changes)
    with serving("--model-id", str(tmp_path), "--dtype", "float32", "--num-shard", "2") as server:
        expected = reference(tmp_path, [tokenize(server, text) for text in PROMPTS], NEW_TOKENS)

        def answers() -> list[list[int]]:
            bodies = [
                generate(server.url, text, max_new_tokens=NEW_TOKENS, details=True)
                for text in PROMPTS
            ]
            return [[token["id"] for token in body["details"]["tokens"]] for body in bodies]

        assert answers() == expected
        assert "backend: transformers, paged" in server.output and "ranks: yes" in server.output
        assert server.output.count("of the model's weights") == 2
        shards = server.shards()
        assert len(shards) == 2
        os.kill(max(shards), signal.SIGKILL)
        assert wait_gone(shards) == []
        assert answers() == expected
        adapted = {"inputs": "A", "parameters": {"adapter_id": "nobody", "max_new_tokens": 1}}
        refusal = post(f"{server.url}/generate", json=adapted)
        assert refusal.status_code >= 400 and "nobody" in refusal.text


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("jetmoe", "which has no plan of how to split its layers over shards"),
        ("doge", "whose plan does not say of 2 shards what one says"),
    ],
)
def test_what_ranks_cannot_serve_ends_the_start_with_the_reason(
    tmp_path: Path, family: str, message: str
) -> None:
    make_checkpoint(tmp_path, family)
    words = ("--model-id", str(tmp_path), "--num-shard", "2", "--shard-restart-limit", "0")
    done = run_warm(
        *("-m", "tgi_trio", "--hostname", "127.0.0.1", "--port", "0", *words), shards="real"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert message in done.stdout + done.stderr
