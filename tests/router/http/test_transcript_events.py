"""Streams of transcriptions by a model that says a sound's language before its text."""

from __future__ import annotations

import json

import pytest

from tgi_trio.router.http.routes.transcriptions import TranscriptEvents
from tgi_trio.router.media.layouts.qwen3_asr import Qwen3AsrLayout
from tgi_trio.router.media.layouts.spoken import AudioTokens
from tgi_trio.router.request import FinishReason, Outcome, Token


@pytest.mark.parametrize(
    ("said", "begun", "deltas", "text"),
    [
        (["language Eng", "lish<asr_", "text>He", "llo"], False, ["He", "llo"], "Hello"),
        (["language None<asr_text>"], False, [], ""),
        (["no ", "mark"], False, ["no mark"], "no mark"),
        (["He", "llo "], True, ["He", "llo "], "Hello"),
        (["x<asr_text>", "a" * 30], False, ["a" * 30], "a"),
    ],
)
def test_the_text_alone_is_streamed(
    said: list[str], begun: bool, deltas: list[str], text: str
) -> None:
    """Without the mark between both, all that is said is text; so it is where a client tells the
    language, which stands in the prompt.
    """
    how = Qwen3AsrLayout(AudioTokens("<|audio_pad|>", "", "")).transcription
    events = TranscriptEvents(7, how, begun=begun)
    tokens = [Token(i, each, 0.0, special=False) for i, each in enumerate(said)]
    outcome = Outcome(FinishReason.EOS_TOKEN, "".join(said), len(said), 7, 0, None)
    parts = [*(events.step([each]) for each in tokens[:-1]), events.end(tokens[-1:], outcome)]
    lines = [each for part in parts for each in part.decode().split("\n\n") if each]
    *found, done = (json.loads(each.removeprefix("data: ")) for each in lines)
    assert [each["delta"] for each in found] == deltas
    assert (done["type"], done["text"]) == ("transcript.text.done", text)
