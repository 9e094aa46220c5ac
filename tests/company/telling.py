"""What clients have been told over HTTP, without what is another at each call."""

from __future__ import annotations

from typing import Any, Final

from tests.company.desk import Exchange, Visit

# By the number of a call, and that of a choice: its events; -1: those of all, or a whole body.
Told = dict[tuple[int, int], list[Any]]

FORGOTTEN: Final = "forgotten"  # for the answer about a response that is not kept any more
_NOT_FOUND: Final = 404
_CACHED: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
# Ids, times, what was found in a cache, and whether there is room to keep an answer.
_PASSING: Final = frozenset(
    {
        *("id", "item_id", "call_id", "response_id", "previous_response_id", "request_id"),
        *("first_id", "last_id", "encrypted_content", "store"),
        *("created", "created_at", "completed_at", "receipt", "timings", "system_fingerprint"),
        *("prompt_tokens_details", "input_tokens_details", "tokens_cached", "sequence_number"),
        *_CACHED,
    }
)


def read_answer(visit: Visit) -> Told:
    """Return what a client has been told; events of several choices come in any order."""
    found: Told = {}
    for number, exchange in enumerate(visit.exchanges):
        for choice, told in _read_exchange(exchange).items():
            found[number, choice] = told
    return found


def _read_exchange(exchange: Exchange) -> dict[int, list[Any]]:
    if exchange.call.body is None and exchange.status == _NOT_FOUND:
        return {-1: [FORGOTTEN]}
    told = exchange.told
    if not exchange.call.streams:
        return {-1: [exchange.status, *map(_lasting, told)]} if told else {}
    found: dict[int, list[Any]] = {}
    for each in told:
        choices = each.get("choices") if isinstance(each, dict) else None
        events = found.setdefault(choices[0]["index"] if choices else -1, [])
        events.append(_lasting(each))
    return {choice: _fold(events) for choice, events in found.items()}


def _fold(events: list[Any]) -> list[Any]:
    """Return events, where one that goes on with the text before it is one with that.

    How much of a text is in an event depends on how many tokens a step brings.
    """
    found = list[Any]()
    for event in events:
        last = found[-1] if found else None
        if (joined := _join(last, event)) is not None:
            found[-1] = joined
        else:
            found.append(event)
    return found


def _join(last: Any, event: Any) -> Any | None:
    """Return two deltas of the same text as one; None where they are something else."""
    if not (isinstance(last, dict) and isinstance(event, dict)) or "delta" not in event:
        return None
    one, other = last.get("delta"), event["delta"]
    if {**last, "delta": None} != {**event, "delta": None}:
        return None
    if isinstance(one, str) and isinstance(other, str):
        return {**event, "delta": one + other}
    if not isinstance(one, dict) or one.keys() != other.keys() or one["type"] != other["type"]:
        return None
    joined = {name: one[name] + other[name] for name in one if name != "type"}
    return {**event, "delta": {"type": one["type"], **joined}}


def _lasting(told: Any) -> Any:
    """Return JSON without what is another at each call."""
    if isinstance(told, dict):
        if "input_tokens" in told:  # Anthropic's have none that were found in a cache
            cached = sum(told.get(name, 0) for name in _CACHED)
            told = {**told, "input_tokens": told["input_tokens"] + cached}
        return {name: _lasting(each) for name, each in told.items() if name not in _PASSING}
    return [_lasting(each) for each in told] if isinstance(told, list) else told
