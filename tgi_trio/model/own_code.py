"""Models with their own Python code: whether it is needed, and whether it may be run.

`auto_map` in config.json names the classes, each as `file.Class`, or `owner/name--file.Class` for
code in another repository of the hub. Such code runs only in the shard and only with
`--trust-remote-code`, and never for a type that this package computes itself (docs/models.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig

_NOTHING: Final = "--trust-remote-code changes nothing for the model: "


@dataclass(frozen=True, slots=True)
class OwnCode:
    """What `auto_map` states about a model's configuration and model classes."""

    files: tuple[str, ...]  # beside config.json
    elsewhere: tuple[str, ...]  # repositories with the other files


def own_code(config: ModelConfig) -> OwnCode | None:
    """Return the code that a config.json refers to, or None."""
    table = config.get("auto_map")
    if not isinstance(table, dict):
        return None
    places = [
        str(place) for name, place in table.items() if name.startswith(("AutoConfig", "AutoM"))
    ]
    here = {place.split(".")[0] + ".py" for place in places if "--" not in place}
    there = {place.split("--")[0] for place in places if "--" in place}
    return OwnCode(tuple(sorted(here)), tuple(sorted(there))) if places else None


def runnable_code(config: ModelConfig) -> OwnCode | None:
    """Return a model's own code, or None unless all of it is in the folder."""
    code = own_code(config)
    return None if code is None or code.elsewhere or _find_missing(config, code) else code


def check_own_code(config: ModelConfig, trusted: bool, *, needed: bool, ours: bool) -> list[str]:
    """Return warnings before a model is served, a sentence each.

    `needed`: only its own code implements the model's type. `ours`: this package computes it, and
    never runs such code. Raises ModelLoadError if the code is needed but may not, or cannot, be
    run.
    """
    code, folder = own_code(config), config.folder
    if code is None or ours:
        why = f"{folder} brings no code for it"
        if code is not None:
            why = f"type {config.model_type!r} is computed here, without the code in {folder}"
        return [_NOTHING + why] if trusted else []
    if needed and not trusted:
        raise ModelLoadError(
            f"Model type {config.model_type!r} is known neither here nor to transformers; {folder} "
            f"brings code for it ({_list_files(code)}), which is not run unless asked for. Read "
            "that code; if you trust it, give --trust-remote-code: it then runs in the shard, with "
            "all rights of this server."
        )
    if needed and code.elsewhere:
        raise ModelLoadError(
            f"{folder / 'config.json'} takes its code from {', '.join(code.elsewhere)}, which is "
            "not downloaded. Copy that repository's *.py files into the folder, and in auto_map "
            "leave out the part up to `--`."
        )
    if needed and (missing := _find_missing(config, code)):
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}, the code that its config.json names. Copy the "
            "*.py files of the model into it, or download it again with --trust-remote-code."
        )
    if not trusted:
        return []
    if runnable_code(config) is None:
        return [_NOTHING + f"the code it names ({_list_files(code)}) is not all in {folder}"]
    return [
        f"--trust-remote-code: code that comes with {folder} ({_list_files(code)}) is run in the "
        "shard, with all rights of this server"
    ]


def _find_missing(config: ModelConfig, code: OwnCode) -> list[str]:
    return [name for name in code.files if not (config.folder / name).is_file()]


def _list_files(code: OwnCode) -> str:
    return ", ".join((*code.files, *(f"{name} on the hub" for name in code.elsewhere)))
