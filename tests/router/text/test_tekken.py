"""Mistral's own tokenizers: ids of texts and prompts are those of mistral-common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.text.tekken_cases import (
    CONVERSATIONS,
    IDS,
    LANGUAGES,
    SECONDS,
    TEXTS,
    TOOL,
    VERSIONS,
    make_tekken,
    say,
)
from tgi_trio.errors import ModelLoadError, TemplateError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.audio import PiecesLayout, lay_out_voxtral
from tgi_trio.router.media.layouts.layout import ImageSettings
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tekken import convert_tekken
from tgi_trio.router.text.tokenizer_files import read_tokenizer_config, tokenizer_json
from tgi_trio.router.text.tools.call_formats import find_format

MARK = "[AUDIO]"


@pytest.mark.parametrize("version", VERSIONS)
def test_ids_are_those_of_mistral_common(tmp_path: Path, version: str) -> None:
    """With what the router writes in the place of sounds."""
    from tokenizers import Tokenizer

    (tmp_path / "tekken.json").write_text(json.dumps(make_tekken(version)))
    expected = json.loads(IDS.read_text())[version]
    file = tokenizer_json(tmp_path, tmp_path / "cache")
    assert tokenizer_json(tmp_path, tmp_path / "cache") == file
    tokenizer = Tokenizer.from_file(str(file))
    for text, ids in zip(TEXTS, expected["texts"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [1, *ids]
        assert tokenizer.decode(ids) == text
    config = read_tokenizer_config(tmp_path)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert config.special_tokens == named
    template = ChatTemplate(config.chat_templates, config.special_tokens)
    calls = {"v7": "mistral", "v11": "mistral-id", "v13": "mistral-args"}
    assert find_format(config.chat_templates["default"]).name == calls[version]
    layout = lay_out_voxtral({}, ImageSettings({}), {})
    assert isinstance(layout, PiecesLayout)
    assert layout.around == ("[BEGIN_AUDIO]", "")
    for (messages, with_tool, _), ids in zip(CONVERSATIONS, expected["prompts"], strict=True):
        if ids is None:
            with pytest.raises(TemplateError, match="no system message where audio is heard"):
                template.render(messages)
            continue
        first, *others = template.render(messages, tools=[TOOL] if with_tool else None).split(MARK)
        seconds = (SECONDS[0], *[SECONDS[1]] * len(others))
        text = first + "".join(
            layout.expand(Sound(int(16_000 * each), 16_000)) + other
            for each, other in zip(seconds, others, strict=False)
        )
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    begin, end, mark = layout.transcription[1:4]
    for language, ids in zip(LANGUAGES, expected["transcriptions"], strict=True):
        spoken = "" if language is None else f"lang:{language}"
        text = f"<s>{begin}{layout.expand(Sound(8000, 16_000))}{end}{spoken}{mark}"
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids


def test_a_tokenizer_json_beside_it_is_read_instead(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is no tokenizer of Mistral's"):
        read_tokenizer_config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not read_tokenizer_config(tmp_path).chat_templates


def test_older_files_list_no_special_tokens_and_other_versions_have_no_template(
    tmp_path: Path,
) -> None:
    older = make_tekken("v3")
    del older["special_tokens"]
    found = convert_tekken(older)
    assert [each["content"] for each in found["added_tokens"]][10:21:10] == [
        "[IMG]",
        "<SPECIAL_20>",
    ]
    (tmp_path / "tekken.json").write_text(json.dumps(older))
    config = read_tokenizer_config(tmp_path)
    assert config.special_tokens["eos_token"] == "</s>" and not config.chat_templates


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vocab": [{"rank": 0, "token_bytes": "AA=="}]}, "has 1 tokens, and 330 are wanted"),
        ({"vocab": [{"rank": 0}]}, "vocabulary of tekken.json cannot be read"),
        (
            {"special_tokens": [{"rank": 0, "token_str": "<unk>"}]},
            "lack the beginning of a text, or have one twice",
        ),
        ({"special_tokens": [{"rank": "x"}]}, "special tokens of tekken.json cannot be read"),
    ],
)
def test_files_that_make_no_sense_are_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        convert_tekken(make_tekken("v7") | change)


def test_what_no_message_may_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(make_tekken("v13")))
    config = read_tokenizer_config(tmp_path)
    template = ChatTemplate(config.chat_templates, config.special_tokens)
    with pytest.raises(TemplateError, match="messages of this model hold text and audio"):
        template.render([say("user", {"type": "image"})])
    with pytest.raises(TemplateError, match="roles are system, user, assistant and tool"):
        template.render([say("critic", "Well.")])
