"""Shows settings to people and programs: the table at the start, JSON logs, GET /info."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from tgi_trio.settings.records import AsGiven, Settings

SECRET: Final = "(set)"
_SETTING_OF: Final = {"served_model_name": "served_model_names"}  # option -> setting


def as_rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, origin) of every setting.

    Origin: "asked"; "default"; "computed", which is also what the checkpoint decides where nobody
    asked; or "the model" if it overrules what was asked.
    """
    defaults = {f.name: f.default for f in fields(AsGiven)}
    explicit = {_SETTING_OF.get(name, name) for name in settings.explicit}
    for name, value in as_json(settings).items():
        kept = not value or getattr(settings, name) == defaults.get(name)
        default = name in defaults and kept
        origin = "asked" if name in explicit else "default" if default else "computed"
        origin = "the model" if name in settings.overruled else origin
        text = (
            ", ".join(map(str, value))
            if isinstance(value, list)
            else "-"
            if value is None
            else str(value)
        )
        yield name, text or "-", origin


# Paths and addresses on this machine are for the operator, not for every client.
_PLACES: Final = frozenset(
    "model_path tokenizer_path huggingface_hub_cache tokenizer_config_path chat_template bind "
    "draft_model ssl_certfile ssl_keyfile api_key_file "
    "cluster_secret_file otlp_endpoint lora_adapters adapter_folders adapter_folder "
    "prefix_cache_path record_schedule".split()
)


def public_json(settings: Settings) -> dict[str, Any]:
    """Return the settings that any client may read, for GET /info."""
    return {name: value for name, value in as_json(settings).items() if name not in _PLACES}


def as_json(settings: Settings) -> dict[str, Any]:
    """Return every setting as JSON values; of API keys only that they are set."""
    result: dict[str, Any] = {}
    for name in (f.name for f in fields(Settings)):
        value = getattr(settings, name)
        if name in ("explicit", "overruled"):
            continue
        if name == "api_key" and (value or settings.api_key_file):
            value = SECRET
        result[name] = (
            list(value)
            if isinstance(value, tuple)
            else str(value)
            if isinstance(value, Path)
            else value
        )
    return result
