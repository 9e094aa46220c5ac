"""What OpenAI's endpoints answer to a fake engine, for tests."""

from __future__ import annotations

import re

from tests.router.http.fake_engine import FakeEngine

NAMES = '"model":"test/model","system_fingerprint":"0.1.0-native"'


def engine(text: str = "Hi") -> FakeEngine:
    return FakeEngine(lambda prompt: text)


def undated(answer) -> str:
    return re.sub(r'"created":\d{10}', '"created":0', answer.text)


def frames(*events: str) -> str:
    return "".join(f"data: {event}\n\n" for event in events)
