"""Fields that the answers of several APIs have: the model's name, id, time and fingerprint."""

from __future__ import annotations

import time

from tgi_trio import __version__
from tgi_trio.errors import name_param
from tgi_trio.router.http.call import Call, HttpSettings
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.settings.base_names import BASE_NAMES, names_base


def resolve_model(call: Call, name: str | None) -> str:
    """Return the name an answer carries for the model that `name` stands for.

    If that is an adapter, it is noted in the call, for `validate_request`.

    Raises Refused (404), listing what is served, for a name that is not ours.
    """
    card, adapters = call.engine.model, call.engine.adapters
    call.adapter = call.own_text_processor = None  # one call may have several bodies
    if name is None or names_base(name):
        return card.id
    if name == card.id or name in card.aliases:
        return name
    if adapters.serves(name):
        call.adapter = name
        return name
    names = (card.id, *card.aliases, *sorted(BASE_NAMES), *adapters.names)
    served = ", ".join(f"`{each}`" for each in names)
    text = f"The model `{name}` is not served here. Served: {served}"
    raise name_param(Refused(404, text, "not_found", code="model_not_found"), "model")


async def use_model(call: Call, name: str | None) -> str:
    """Do what `resolve_model` does, and have the call use the text processor of an adapter.

    Raises ValidationError as well if that cannot be read.
    """
    resolved = resolve_model(call, name)
    if call.adapter is not None:
        adapter = call.engine.adapters.find(call.adapter)
        call.own_text_processor = await call.engine.text_processors.find(adapter)
    return resolved


async def use_queried_model(call: Call) -> None:
    """Do what `use_model` does, with the `model` that the query names, if any.

    Raises as `use_model`, and Refused (400) for more than one.
    """
    names = call.query.get("model", [])
    if len(names) > 1:
        text = "`model` is given more than once behind the path: send one"
        raise name_param(Refused(400, text, "invalid_query"), "model")
    await use_model(call, names[0] if names else None)


def fingerprint(settings: HttpSettings) -> str:
    """Return `system_fingerprint`."""
    return f"{__version__}-{settings.docker_label or 'native'}"


def new_id(call: Call, kind: str) -> str:
    """Return the `id` of an answer: unique, and nobody can guess another's."""
    return f"{kind}-{call.ids.randbytes(16).hex()}"


def unix_now() -> int:
    """Return the time for `created`."""
    return int(time.time())
