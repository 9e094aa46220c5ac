"""Chat templates of models whose folders have none, as their own programs write a prompt.

Sources: `transformers`' processor of GOT-OCR 2; the prompts of the model cards of DeepSeek-OCR 1
and 2, whose code puts nothing around them; Mistral's files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tgi_trio.model.config import read_values
from tgi_trio.router.text.byte_ranks import Json
from tgi_trio.router.text.tekken import write_template

# What is asked where a client says nothing but the page.
_READ: Final = " OCR: "
_GOT: Final = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou should follow the "
    "instructions carefully and explain your answers in detail.<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<img><imgpad></img>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% if not message['content'] | selectattr('type', 'equalto', 'text') | list %}"
    f"{_READ}{{% endif %}}{{% endif %}}<|im_end|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_DEEPSEEK: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
# By `model_type`, as transformers' class has it.
_TEMPLATES: Final[Mapping[str, str]] = {
    "deepseek_ocr2": _DEEPSEEK,
    "got_ocr2": _GOT,
    "unlimited_ocr": _DEEPSEEK,
}


def write_templates(folder: Path, tekken: Json | None) -> dict[str, str]:
    """Return the templates of a model whose folder has none; {}: none is known.

    `tekken`: its tokenizer, if it is Mistral's. Raises ModelLoadError for a config.json that cannot
    be read.
    """
    if tekken is not None and (own := write_template(tekken)) is not None:
        return {"default": own}
    kind: Any = (read_values(folder) or {}).get("model_type")
    return {"default": _TEMPLATES[kind]} if kind in _TEMPLATES else {}
