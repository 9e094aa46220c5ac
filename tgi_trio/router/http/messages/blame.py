"""Which field of a request an error is about, and OpenAI's word for what is wrong with it.

OpenAI's clients show both (`param`, `code`), and agents branch on the words. Whoever raises an
error may name the field (`TgiTrioError.param`). Most need not: texts, TGI's and ours, begin with
it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Final

from tgi_trio.router.http.messages.problems import Problem

_KINDS: Final = re.compile(
    "(?:Input validation error|Tool error|"
    "Failed to deserialize the JSON body into the target type): "
)
_PATH: Final = re.compile(r"`?([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)")
_MISSING: Final = re.compile(r"missing (?:required )?field `(\w+)`")
_OF_STATUS: Final[Mapping[int, str]] = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_FAULTS: Final[Mapping[str, re.Pattern[str]]] = {
    "missing_required_parameter": _MISSING,
    "invalid_type": re.compile("Expected `.*, got `"),
    "unsupported_value": re.compile("is not supported when"),
    "unsupported_parameter": re.compile(
        f"^(?:{_KINDS.pattern})?`?[\\w.]+`? is not supported|: not read"
    ),
}


def find_param(problem: Problem, fields: Container[str], renamed: Mapping[str, str]) -> str | None:
    """Return the path of the field that a problem is about, such as `messages[0].content`.

    `fields`: those of the body; `renamed`: what a field of TGI's is called there. None if there is
    no such field.
    """
    text = _KINDS.sub("", problem.error, count=1)
    found, missing = _PATH.match(text), _MISSING.search(text)
    given = problem.param or (found[1] if found is not None else "")
    root = re.split(r"[.\[]", given, maxsplit=1)[0]
    path = renamed.get(root, root) + given[len(root) :]
    if renamed.get(root, root) in fields:
        return path if missing is None or problem.param else f"{path}.{missing[1]}"
    if missing is not None and missing[1] in fields:
        return missing[1]
    return "tools" if problem.error_type == "tool_error" and "tools" in fields else None


def find_code(problem: Problem, param: str | None) -> str | None:
    """Return OpenAI's word for a problem with the field `param`, None for none of its own."""
    if problem.code is not None:
        return problem.code
    if problem.too_long is not None:
        return "context_length_exceeded"
    if problem.status >= 500 or problem.status == 424:
        return "server_error"
    if problem.status in _OF_STATUS or param is None:
        return _OF_STATUS.get(problem.status)
    faults = (code for code, sign in _FAULTS.items() if sign.search(problem.error))
    return next(faults, "invalid_value")


def describe_length(problem: Problem) -> str:
    """Return a problem's text; for a prompt that is too long, what agents look for in it.

    Each looks for words of its own: OpenAI's of before and of today, Anthropic's, Groq's, vLLM's.
    """
    length = problem.too_long
    if length is None:
        return problem.error
    answer = f" for an answer of {length.requested}" if length.requested else ""
    return (
        f"This model's maximum context length is {length.total} tokens, and the prompt is too long"
        f"{answer}: it has {length.tokens} tokens, and exceeds the context window, in which there "
        f"is room for a prompt of {length.most}. Please reduce the length of the messages."
    )
