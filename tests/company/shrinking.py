"""Makes a company that fails as small as it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.company.bodies import ClientCall
from tests.company.companies import Company
from tests.company.guests import Customs, Guest
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.request import Request, StoppingCriteria

_PLAIN = Customs()
_UNASKED = SamplingParameters()
_UNSTOPPED = StoppingCriteria(1)
_NEEDED = frozenset(
    {
        *("inputs", "parameters", "prompt", "messages", "input", "seed", "model"),
        *("max_tokens", "max_output_tokens", "n_predict", "input_prefix", "input_suffix"),
    }
)  # of a call


def shrink(company: Company, fails: Callable[[Company], bool], most: int = 400) -> Company:
    """Return a company of which nothing can be left out, or as far as `most` attempts go."""
    left = most
    while True:
        for smaller in _smaller(company):
            left -= 1
            if left < 0:
                return company
            if fails(smaller):
                company = smaller
                break
        else:
            return company


def _smaller(company: Company) -> Iterator[Company]:
    """Yield companies with one thing fewer, those first that leave out most."""
    for place in range(len(company.guests)):
        if len(company.guests) > 1:
            yield company.without(place)
    for field in fields(Customs):
        plain = getattr(_PLAIN, field.name)
        if getattr(company.customs, field.name) != plain:
            yield replace(company, customs=replace(company.customs, **{field.name: plain}))
    for place, guest in enumerate(company.guests):
        for simpler in _simpler(guest):
            guests = (*company.guests[:place], simpler, *company.guests[place + 1 :])
            yield replace(company, guests=guests)


def _simpler(guest: Guest) -> Iterator[Guest]:
    request = guest.request
    if guest.leaves is not None:
        yield replace(guest, leaves=None)
    if guest.patience is not None:
        yield replace(guest, patience=None)
    if guest.resumes:
        yield replace(guest, resumes=0.0)
    if guest.comes:
        yield replace(guest, comes=0)
        yield replace(guest, comes=guest.comes - 1)
    if guest.call is not None:
        yield from (replace(guest, call=each) for each in _fewer_fields(guest.call))
        return
    yield from (replace(guest, request=each) for each in _plainer(request))


def _fewer_fields(call: ClientCall) -> Iterator[ClientCall]:
    """Yield a call without one of the fields that it can do without, or what comes behind it."""
    if call.then and not call.before:
        yield replace(call, then=call.then[:-1])
    if call.body is None:
        return
    for name, value in call.body.items():
        rest = {key: each for key, each in call.body.items() if key != name}
        if name not in _NEEDED:
            yield replace(call, body=rest)
        elif isinstance(value, dict):
            for inner in value:
                less = {key: each for key, each in value.items() if key != inner}
                yield replace(call, body=rest | {name: less})


def _plainer(request: Request) -> Iterator[Request]:
    sampling, stopping = request.sampling, request.stopping
    for field in fields(SamplingParameters):
        plain = getattr(_UNASKED, field.name)
        if getattr(sampling, field.name) != plain:
            yield replace(request, sampling=replace(sampling, **{field.name: plain}))
    for field in fields(StoppingCriteria):
        plain = getattr(_UNSTOPPED, field.name)
        if getattr(stopping, field.name) != plain and field.name != "max_new_tokens":
            yield replace(request, stopping=replace(stopping, **{field.name: plain}))
    if request.images:
        yield replace(request, images=())
        yield replace(request, images=request.images[:-1])
    behind = max((image.end for image in request.images), default=0)
    for count in {len(request.prompt_ids) // 2, len(request.prompt_ids) - 1} - {0}:
        if count > behind:
            yield replace(request, prompt_ids=request.prompt_ids[:count])
    for most in {stopping.max_new_tokens // 2, stopping.max_new_tokens - 1} - {0}:
        least = min(most, stopping.min_new_tokens)
        yield replace(
            request, stopping=replace(stopping, max_new_tokens=most, min_new_tokens=least)
        )
