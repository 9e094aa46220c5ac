"""Every argument of the `openai` package's transcriptions is read, or refused by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai import OpenAI, UnprocessableEntityError

from tests.router.media.sound_files import make_sound

pytestmark = pytest.mark.system

# By argument: what is read, of what is refused with the reason.
READ: dict[str, Any] = {
    "model": "tgi",
    "language": "en",
    "prompt": "Names: Zyntrix.",
    "stream": True,
    "temperature": 0.2,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "chunking_strategy": ("auto", "a sound is heard as a whole"),
    "include": (["logprobs"], "answers have no log-probabilities"),
    "keywords": (["Zyntrix"], "use `prompt`"),
    "known_speaker_names": (["Ann", "Bob"], "speakers are not told apart"),
    "known_speaker_references": (["data:,x"], "speakers are not told apart"),
    "languages": (["en", "fr"], "use `language`"),
    "timestamp_granularities": (["word", "segment"], "models tell no times"),
}
FORMATS = ("srt", "vtt", "verbose_json", "diarized_json")


def test_no_argument_is_passed_over(openai: OpenAI) -> None:
    """A model that does not hear says so behind whatever is wrong with the form."""
    create: Any = openai.audio.transcriptions.create
    own = {"extra_headers", "extra_query", "extra_body", "timeout"}
    every = inspect.signature(create).parameters.keys() - own - {"file", "response_format"}
    assert every == READ.keys() | REFUSED.keys()
    asked = {"file": ("a.wav", make_sound(0.2)), "model": "tgi"}

    def refusal(**more: Any) -> str:
        with pytest.raises(UnprocessableEntityError) as refused:
            list(create(**asked | more))
        return str(refused.value)

    for name, value in READ.items():
        assert "this model does not hear" in refusal(**{name: value}), name
    for name, (value, why) in REFUSED.items():
        assert f"`{name}` is not supported: {why}" in refusal(**{name: value})
    for each in FORMATS:
        said = refusal(response_format=each)
        assert "`response_format` is to be `json` or `text`: no times are known" in said
