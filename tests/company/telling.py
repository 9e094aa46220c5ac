"""What clients have been told over HTTP, without what is another at each call."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tests.company.desk import Visit

_PASSING: Final = frozenset(
    {"id", "created", "receipt", "system_fingerprint", "prompt_tokens_details", "timings"}
)


def read_answer(visit: Visit) -> dict[int, list[Any]]:
    """Return what a client has been told, without what tells times; see `Answer.told`.

    Events of several choices come in any order.
    """
    whole = b"".join(visit.pieces)
    if not whole.startswith((b"data:", b":")):
        return {-1: [visit.status, _lasting(msgspec.json.decode(whole))]} if whole else {}
    found: dict[int, list[Any]] = {}
    for each in whole.split(b"\n\n")[:-1]:
        if each != b":":
            event = each.removeprefix(b"data:").strip()
            told = _lasting(msgspec.json.decode(event)) if event != b"[DONE]" else "done"
            choices = told.get("choices") if isinstance(told, dict) else None
            found.setdefault(choices[0]["index"] if choices else -1, []).append(told)
    return found


def _lasting(told: Any) -> Any:
    """Return JSON without what is another at each call."""
    if isinstance(told, dict):
        return {name: _lasting(each) for name, each in told.items() if name not in _PASSING}
    return [_lasting(each) for each in told] if isinstance(told, list) else told
