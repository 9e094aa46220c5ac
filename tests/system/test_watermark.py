"""`--watermark-gamma` and `--watermark-delta`, seen by a client who knows the rule."""

from __future__ import annotations

import itertools

import pytest

from tests.shard.test_watermark import green_list
from tests.system.client import get, post
from tests.system.server import serving
from tgi_trio import demo
from tgi_trio.model.facts import read_model_facts

pytestmark = pytest.mark.system

GAMMA = 0.05


@pytest.mark.parametrize("way", [("--cpu-backend", "kernels"), ("--num-shard", "2")])
def test_with_a_large_delta_every_token_is_green(way: tuple[str, str]) -> None:
    size = read_model_facts(demo.model_path()).vocab_size
    assert size is not None
    flags = ("--watermark-gamma", str(GAMMA), "--watermark-delta", "500")
    with serving(*flags, *way) as server:
        parameters = {
            "max_new_tokens": 40, "watermark": True, "details": True, "seed": 3,
            "do_sample": True, "decoder_input_details": True,
        }  # fmt: skip
        body = {"inputs": "The old harbour", "parameters": parameters}
        answer = post(f"{server.url}/generate", json=body).json()
        again = post(f"{server.url}/generate", json=body).json()
        settings = get(f"{server.url}/info").json()["settings"]
    prompt = [token["id"] for token in answer["details"]["prefill"]]
    ids = prompt[-1:] + [token["id"] for token in answer["details"]["tokens"]]
    assert len(ids) > 10
    for previous, token in itertools.pairwise(ids):
        assert token in green_list(previous, GAMMA, size)
    assert again["generated_text"] == answer["generated_text"]
    assert (settings["watermark_gamma"], settings["watermark_delta"]) == (GAMMA, 500)
