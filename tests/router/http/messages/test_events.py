"""What events of streams say is what bodies say."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.http.fake_engine import byte_tokenizer
from tgi_trio.router.http.messages.events import (
    ChatEvents,
    CompletionEvents,
    Envelope,
    NativeEvents,
    QueryEvents,
)
from tgi_trio.router.http.messages.extras import TokenExtras
from tgi_trio.router.http.messages.logprobs import LogprobWriter
from tgi_trio.router.http.messages.render import number_json
from tgi_trio.router.http.messages.usage import UsageCount
from tgi_trio.router.request import FinishReason, Outcome, StoppingCriteria, Token
from tgi_trio.router.text.output import OutputText

Make = Callable[[], NativeEvents | ChatEvents | CompletionEvents]
TOKENIZER = byte_tokenizer()
ENVELOPE = Envelope("chatcmpl-1", 0, "m", "f")
SHOWN = TokenExtras(LogprobWriter(TOKENIZER))
FAMILIES: dict[str, tuple[bool, Make, Callable[[Any], str]]] = {
    "native": (True, lambda: NativeEvents("", True), lambda event: event["token"]["text"]),
    "queries": (
        True,
        lambda: QueryEvents("", True, 0, itertools.count(1)),
        lambda event: event["token"]["text"],
    ),
    "chat": (
        False,
        lambda: ChatEvents(ENVELOPE, 0, UsageCount(1), SHOWN),
        lambda event: event["choices"][0]["delta"]["content"],
    ),
    "completions": (
        False,
        lambda: CompletionEvents(ENVELOPE, 0, UsageCount(1), "", SHOWN),
        lambda event: event["choices"][0]["text"],
    ),
}


@settings(deadline=None)
@given(
    text=st.text(max_size=30),
    stops=st.lists(st.text(min_size=1, max_size=3), max_size=2),
    cuts=st.lists(st.integers(1, 4), max_size=40),
    family=st.sampled_from(sorted(FAMILIES)),
    end=st.booleans(),
)
def test_the_texts_of_the_events_are_the_text_of_the_body(text, stops, cuts, family, end):
    keep_stop, make, text_of = FAMILIES[family]
    stopping = StoppingCriteria(1000, stop=tuple(stops), keep_stop=keep_stop)
    output = OutputText(TOKENIZER, [0], stopping)
    tokens: list[Token] = []
    ids = [*TOKENIZER.encode_ids(text, False).tolist(), *([1] if end else [])]
    for id in ids:
        tokens.append(output.push(id, -1.5))
        if output.stopped:
            break
    tail = output.finish()
    outcome = Outcome(
        FinishReason.LENGTH, output.generated_text, len(tokens), 1, 0, None, tail=tail
    )

    events, data, rest = make(), b"", tokens
    for cut in cuts:  # however the tokens are spread over steps
        if len(rest) <= cut:
            break
        data += events.step(rest[:cut])
        rest = rest[cut:]
    data += events.end(rest, outcome)

    decoded = [orjson.loads(frame[6:]) for frame in data.split(b"\n\n") if frame]
    special = [keep_stop and bool(each.get("token", {}).get("special")) for each in decoded]
    joined = "".join(text_of(each) for each, s in zip(decoded, special, strict=True) if not s)
    hidden = tail if special and special[-1] else ""
    assert joined + hidden == outcome.text
    if family in ("native", "queries"):
        assert decoded[-1]["generated_text"] == outcome.text
        assert [each["index"] for each in decoded] == list(range(1, len(decoded) + 1))


@given(st.floats(width=32, allow_nan=True, allow_infinity=True))
def test_logprobs_are_written_as_float32(value):
    written = number_json(value)
    if math.isfinite(value):
        assert np.float32(orjson.loads(written)) == np.float32(value)
        digits = re.sub(rb"e.*|[-.]", b"", written).strip(b"0")
        assert len(digits) <= 9, "the fewest digits of a float32, not of a float64"
    else:
        assert written == b"null"
