"""What OpenAI's endpoints answer to a fake engine, for tests."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.router.http.fake_engine import FakeEngine

# What follows `"finish_reason":` before the end, at the fake model's end token, and at the limit.
GOING_ON = 'null,"stop_reason":null,"matched_stop":null'
EOS = '"stop","stop_reason":null,"matched_stop":1'
LENGTH = '"length","stop_reason":null,"matched_stop":null'
NAMES = '"model":"test/model","system_fingerprint":"0.1.0-native"'


def engine(text: str = "Hi") -> FakeEngine:
    return FakeEngine(lambda prompt: text)


def undated(answer) -> str:
    """Return the body of an answer without what no two have in common."""
    text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]{32}"', r'"id":"\1"', answer.text)
    return re.sub(r'"created":\d{10}', '"created":0', text)


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """Return OpenAI's Usage."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def usage_text(prompt: int, completion: int) -> str:
    """Return Usage as it is written."""
    return json.dumps(usage(prompt, completion), separators=(",", ":"))


def frames(*events: str) -> str:
    return "".join(f"data: {event}\n\n" for event in events)
