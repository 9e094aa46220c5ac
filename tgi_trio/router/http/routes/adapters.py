"""Loads and unloads adapters at run time: vLLM's routes, with its messages.

They exist only with --adapter-updates, require the API key, and load only from below
--adapter-folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.messages import token_schema
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.error_shapes import OPENAI
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.text.own_files import PATTERNS
from tgi_trio.settings.base_names import names_base
from tgi_trio.whole_files import resolve_links

_LOAD = BodyReader(token_schema.LoadAdapterRequest)
_LONGEST_NAME = 256  # characters
_UNLOAD = BodyReader(token_schema.UnloadAdapterRequest)


async def load_adapter(call: Call) -> Reply:
    """POST /v1/load_lora_adapter: serve another adapter; replies once the shard has it."""
    root = _root(call)
    request: token_schema.LoadAdapterRequest = await call.read(_LOAD)
    name, place = request.lora_name, request.lora_path
    if not name or not place:
        raise _refused("Both 'lora_name' and 'lora_path' must be provided.")
    card, adapters = call.engine.model, call.engine.adapters
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise _refused(f"'lora_name' must be printable, of at most {_LONGEST_NAME} characters.")
    if name in (card.id, *card.aliases) or names_base(name):
        raise _refused(f"The name '{name}' is the model's own.")
    if adapters.serves(name) and not request.load_inplace:
        raise _refused(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter "
            "in place, set 'load_inplace' to True."
        )
    folder = _find_folder(root, place)
    try:
        await call.engine.text_processors.check(folder)
        await adapters.load(name, folder, replace=request.load_inplace)
    except ValidationError as error:
        raise _refused(str(error)) from error
    call.engine.metrics.know("adapter", name)
    return _text(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(call: Call) -> Reply:
    """POST /v1/unload_lora_adapter: stop serving an adapter; requests that use it still finish."""
    _root(call)
    request: token_schema.UnloadAdapterRequest = await call.read(_UNLOAD)
    name = request.lora_name
    if not name:
        raise _refused("'lora_name' needs to be provided to unload a LoRA adapter.")
    if not call.engine.adapters.serves(name):
        raise Refused(404, f"The lora adapter '{name}' cannot be found.", "not_found")
    call.engine.adapters.unload(name)
    call.engine.metrics.forget("adapter", name)
    return _text(f"Success: LoRA adapter '{name}' removed successfully.")


def _root(call: Call) -> Path:
    folder = call.settings.adapter_folder
    if folder is None:
        raise Refused(404, "The server was started without --adapter-updates", "not_found")
    return folder


def _find_folder(root: Path, place: str) -> Path:
    """Return a folder below `root`, with links resolved. Raises Refused (400)."""
    try:
        folder, top = resolve_links(root / place), resolve_links(root)
        if folder.is_relative_to(top) and folder.is_dir():
            for file in _list_files(folder):
                if not resolve_links(file).is_relative_to(top):
                    raise _refused(f"'{file.name}' of '{place}' lies outside of --adapter-folder.")
            return folder
    except (OSError, ValueError):  # a name that cannot be a file's
        pass
    raise _refused(f"There is no folder '{place}' below --adapter-folder.")


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the files that are read: adapter_config.json, the weights, those of a tokenizer."""
    for pattern in ("adapter_*", *PATTERNS):
        yield from folder.glob(pattern)


def _refused(text: str) -> Refused:
    return Refused(400, text, "invalid_request_error")


def _text(line: str) -> Reply:
    return Reply(line.encode(), content_type=b"text/plain; charset=utf-8")


ROUTES = (
    Route("POST", "/v1/load_lora_adapter", load_adapter, dialect=OPENAI),
    Route("POST", "/v1/unload_lora_adapter", unload_adapter, dialect=OPENAI),
)
