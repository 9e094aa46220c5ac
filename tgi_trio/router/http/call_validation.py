"""Validates a prompt of a call, with what the call adds: its deadline, images and adapter."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from tgi_trio.errors import GenerationError, ValidationError, name_param
from tgi_trio.model.audio_families import AUDIO_FAMILIES
from tgi_trio.model.video_families import VIDEO_FAMILIES
from tgi_trio.router.adapters.served_adapter import ServedAdapter
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.deadlines import find_deadline
from tgi_trio.router.media.image_prompt import ExpandedPrompt, ImagePrompt, Prompt
from tgi_trio.router.media.kinds import WORDS, Kind, name_kinds
from tgi_trio.router.media.links import MediaLink
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import Request

# The types of models that take what is no image, for errors.
_FAMILIES: Final[Mapping[Kind, Collection[str]]] = {
    "video": VIDEO_FAMILIES,
    "audio": AUDIO_FAMILIES,
}


class Schedulable(Protocol):
    """The fields of a body that concern scheduling."""

    timeout: float | None  # seconds from the request's arrival
    priority: int | None  # lower is sooner
    cache_salt: str | None  # prefixes are shared only with requests of the same salt


async def validate_request(
    call: Call,
    prompt: Prompt | Sequence[int] | NDArray[np.int32],
    parameters: GenerationParameters,
    body: Schedulable,
    *,
    add_special_tokens: bool = True,
) -> Request:
    """Return the request for one prompt of a call. Raises ValidationError.

    Its adapter, if any, then stays in the shard's memory until the call ends.
    """
    adapter = _find_adapter(call, prompt, parameters)
    call.own_text_processor = (
        None if adapter is None else await call.engine.text_processors.find(adapter)
    )
    until = find_deadline(call, body.timeout)
    read: str | Sequence[int] | NDArray[np.int32] | ExpandedPrompt
    if isinstance(prompt, ImagePrompt):
        call.engine.validator.check(parameters)  # before anything is fetched
        read = await expand_images(call, prompt)
    else:
        read = prompt
    request = await call.engine.validator.validate(
        read,
        parameters,
        add_special_tokens=add_special_tokens,
        priority=body.priority or 0,
        deadline=until,
        cache_salt=body.cache_salt or "",
        name=call.request_id,
        text_processor=call.own_text_processor,
    )
    if parameters.seed is None and call.front is not None:
        seed = call.front.next_seed()
        if seed is not None:
            request = replace(request, sampling=replace(request.sampling, seed=seed))
    if adapter is None:
        return request
    await _acquire(call, adapter, until)
    if adapter.listed and not adapter.own:  # not listed: unloaded meanwhile, and its series as well
        call.engine.metrics.inc("tgi_adapter_request_count", adapter=adapter.name)
    return replace(request, sampling=replace(request.sampling, adapter=adapter.number))


async def expand_images(call: Call, prompt: ImagePrompt) -> ExpandedPrompt:
    """Return the prompt with the tokens that its images take; raises as `MediaReader.read`."""
    for link in prompt.links:
        refuse_media(call, link)
    if call.engine.images is None:
        raise RuntimeError("a prompt without images has been read as one with some")
    held = call.resources.enter_context(call.engine.images.hold_bytes())
    most = call.engine.limits.max_input_tokens
    return await call.engine.images.read(call.cut.restore(prompt), most, held)


def refuse_media(call: Call, link: MediaLink) -> None:
    """Raise ValidationError for an image, or whatever it is, where the model is served without."""
    one, several, sense = WORDS[link.kind]
    images, unserved = call.engine.images, call.engine.model.unserved
    if images is not None:
        unserved = images.unserved
        if link.kind in images.others or (link.kind == "image" and images.layout is not None):
            return
    why = unserved.get(link.kind)
    if not why:
        types = ", ".join(sorted(_FAMILIES.get(link.kind, ())))
        others = f", but those of {types} do" if types else ""
        text = f"{link.where} holds {one}, and this model does not {sense} {several}{others}"
    else:
        text = f"{link.where} holds {one}, and {several} are not served: {why}"
    raise name_param(ValidationError(text), link.field)


def _find_adapter(
    call: Call, prompt: object, parameters: GenerationParameters
) -> ServedAdapter | None:
    """Return the adapter that a client names, or the model's own for what the prompt holds.

    Raises ValidationError for one that is not served, and for both.
    """
    name, adapters = parameters.adapter_id or call.adapter, call.engine.adapters
    named = None if name is None else adapters.find(name)
    kinds = {link.kind for link in prompt.links} if isinstance(prompt, ImagePrompt) else set()
    own = adapters.find_own(kinds)
    if named is not None and own is not None:
        raise ValidationError(
            f"the adapter `{named.name}` cannot be used here: this model has one of its own for "
            f"prompts with {name_kinds(kinds)}. Leave it out, or send a prompt of text alone"
        )
    return named or own


async def _acquire(call: Call, adapter: ServedAdapter, until: float | None) -> None:
    """Have a call keep an adapter in memory, unless it does already. Raises as `acquire` does.

    A call has at most one: calls that hold one and wait for another could deadlock.
    """
    if call.acquired is adapter:
        return
    if call.acquired is not None:
        raise ValidationError(
            f"all prompts of one call have the same adapter, or none. Given: "
            f"`{call.acquired.name}` and `{adapter.name}`"
        )
    with trio.move_on_at(math.inf if until is None else until) as waiting:
        await call.engine.adapters.acquire(adapter)
    if waiting.cancelled_caught:
        raise GenerationError("the request's deadline has passed")
    call.acquired = adapter
    call.resources.callback(call.engine.adapters.release, adapter)
