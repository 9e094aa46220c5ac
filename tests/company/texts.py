"""Tokenizers and chat templates: of a model that is called over HTTP, and of adapters of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tokenizers

# Of Qwen's models: around thoughts, and around gaps.
_MARKS: Final = (
    *("<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"),
)
_IMAGE: Final = "<image>"
_OWN: Final = "<|own|>"  # a token of an adapter
_END: Final = 300  # id of a word that ends the answers of another one
SPARE: Final = len(_MARKS) + 4  # rows of a model for these tokens, and more

# Condensed from those of Qwen 2.5 and 3, whose calls and thoughts it has.
_BEGIN: Final = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% if tools %}<tool_call>\n{% endif %}"
)
_TURNS: Final = (
    "{% for m in messages %}{{ m.role }} "
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}\n{% endfor %}"
)
_ANSWER: Final = (
    "{% if add_generation_prompt %}assistant "
    "<think>\n{% if not enable_thinking %}\n</think>\n{% endif %}{% endif %}"
)
_TEMPLATE: Final = _BEGIN + _TURNS + _ANSWER


def teach(folder: Path) -> Path:
    """Have a model's tokenizer know the tokens, and its template what they are for."""
    _add_tokens(folder, [_IMAGE, *_MARKS])
    _configure(folder, chat_template=_TEMPLATE)
    return folder


def _write_template(folder: Path, base: Path) -> None:
    """Have an adapter write chats in another way, and think where it is not told to."""
    _configure(folder, base, chat_template=f"tone: {_BEGIN}{_TURNS}assistant <think>\n")


def _write_tokenizer(folder: Path, base: Path) -> None:
    """Have an adapter know a token of its own, and end with a word."""
    shutil.copy(base / "tokenizer.json", folder)
    _add_tokens(folder, [_OWN])
    _configure(folder, base)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [_END]}))


def _add_tokens(folder: Path, tokens: list[str]) -> None:
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens([each for each in tokens if tokenizer.token_to_id(each) is None])
    tokenizer.save(file)


def _configure(folder: Path, base: Path | None = None, **changes: Any) -> None:
    """Write tokenizer_config.json; what is not changed is that of `base`, or its own."""
    told = json.loads(((base or folder) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | changes))


# What makes texts of the first adapter, and of the other one, their own.
OWN_TEXTS: Final[tuple[Callable[[Path, Path], None], ...]] = (_write_template, _write_tokenizer)
