"""Where the chat templates of a model's folder are."""

from __future__ import annotations

from pathlib import Path

from tests.router.text.kinds import byte_level, save
from tgi_trio.router.text.tokenizer import Tokenizer


def sources(folder: Path) -> dict[str, str]:
    return Tokenizer.from_folder(folder).chat_templates


def test_a_folder_may_have_none(tmp_path: Path) -> None:
    assert sources(save(byte_level(), tmp_path)) == {}


def test_a_string_or_a_list_of_names_in_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert sources(save(byte_level(), tmp_path / "1", chat_template="x")) == {"default": "x"}
    assert sources(save(byte_level(), tmp_path / "2", chat_template=named)) == {
        "default": "a",
        "tool_use": "b",
    }


def test_files_come_before_json_and_chat_template_json_first(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template="config")
    (folder / "processor_config.json").write_text('{"chat_template": "processor"}')
    assert sources(folder) == {"default": "config"}
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert sources(folder) == {"default": "json"}
    (folder / "chat_template.jinja").write_text("file")
    assert sources(folder) == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert sources(folder) == {"default": "file", "tool_use": "tools"}
