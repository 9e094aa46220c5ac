"""What requests may ask of a device, by kind, and what that launches."""

from __future__ import annotations

from typing import Any

# A model for tests of what comes behind the layers: an interpreter takes seconds for two of them.
SMALL: dict[str, Any] = {"num_hidden_layers": 1}

KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"sample": True, "top_p": 0.9}, {"sample": True, "temperature": 0.7}],
    "penalties": [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2, "sample": True},
        {"frequency_penalty": 0.7, "absolute_penalties": True, "logit_bias": ((5, 3.0),)},
    ],
    "top tokens": [
        {"top_n": 3},
        {"top_n": 1, "sample": True, "top_k": 40, "repetition_penalty": 1.2},
        {"top_n": 20, "sample": True, "temperature": 0.7},
    ],
    "grammar": [{"grammar": "turns"}, {}, {"grammar": "turns", "sample": True, "top_n": 2}],
    "watermark": [{"watermark": True}, {}, {"watermark": True, "sample": True}],
    "prompt logprobs": [
        {"prompt_logprobs": True},
        {"prompt_logprobs": True, "prompt_top_n": 2},
        {"prompt_logprobs": True, "repetition_penalty": 1.2},
    ],
}
# Replays of a step of decodes: a choice that waits for masks is a recording of its own.
REPLAYS = dict.fromkeys(KINDS, 1) | {"grammar": 2, "watermark": 2}
