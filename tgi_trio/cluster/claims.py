"""What replicas say that they serve, and where it differs from what the others say. Pure: no I/O.

All replicas of a front must serve the same: a client is told by any of them what it asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import orjson

Claims = tuple[tuple[str, str], ...]  # pairs of a field of `/info` and its value as JSON

_MODEL: Final = ("model_id", "model_sha")
# What a client can tell two replicas apart by: models, names and limits.
_FIELDS: Final = (
    *(*_MODEL, "adapters", "max_input_tokens", "max_total_tokens"),
    *("max_best_of", "max_stop_sequences", "max_client_batch_size"),
)
_SETTINGS: Final = ("served_model_names", "payload_limit", "max_top_n_tokens", "reasoning")


def read_claims(body: bytes) -> Claims:
    """Return the claims in the answer of `/info`; none if it cannot be read."""
    try:
        info = orjson.loads(body)
    except ValueError:
        return ()
    if not isinstance(info, dict):
        return ()
    settings = info.get("settings")
    own = settings if isinstance(settings, dict) else {}
    found = [(name, info[name]) for name in _FIELDS if name in info]
    found += [(name, own[name]) for name in _SETTINGS if name in own]
    return tuple((name, _write(value)) for name, value in found)


def find_differences(claims: Mapping[str, Claims]) -> dict[str, str]:
    """Return, for each replica that differs from most others, in what; `claims`: by replica.

    Of as many on each side those count that were named first. Replicas without claims are left out.
    """
    known = {name: each for name, each in claims.items() if each}
    if not known:
        return {}
    ((usual, _),) = Counter(known.values()).most_common(1)
    return {name: _compare(each, usual) for name, each in known.items() if each != usual}


def serve_one_model(one: Claims | None, other: Claims | None) -> bool:
    """Return whether a stream of one replica may go on at another, as far as both have said."""
    mine, theirs = dict(one or ()), dict(other or ())
    return all(mine[name] == theirs[name] for name in _MODEL if name in mine and name in theirs)


def _compare(claims: Claims, usual: Claims) -> str:
    mine, theirs = dict(claims), dict(usual)
    names = dict.fromkeys((*mine, *theirs))
    return ", ".join(
        f"{name} is {mine.get(name, 'unknown')}, elsewhere {theirs.get(name, 'unknown')}"
        for name in names
        if mine.get(name) != theirs.get(name)
    )


def _write(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
