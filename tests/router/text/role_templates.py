"""Templates in the manner of the families, as far as it concerns who may speak when."""

from __future__ import annotations

from collections.abc import Mapping

_TOOLS = "{%- if tools %}{{- '<tools>' ~ tools | tojson ~ '</tools>' }}{%- endif %}"
_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '<call>' ~ c.function | tojson ~ '</call>' }}"
    "{%- endfor %}"
)
_PROMPT = "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"


def _turn(role: str = "m.role") -> str:
    return f"{{{{- '<' ~ {role} ~ '>' ~ m.content }}}}{_CALLS}{{{{- '<end>' }}}}"


_KNOWN = "m.role in ('system', 'user', 'assistant', 'tool')"


def _if(condition: str, body: str, otherwise: str = "") -> str:
    return f"{{%- if {condition} %}}{body}{{%- else %}}{otherwise}{{%- endif %}}"


def _raise(message: str) -> str:
    return f"{{{{- raise_exception('{message}') }}}}"


def _each(body: str) -> str:
    return _TOOLS + "{%- for m in messages %}" + body + "{%- endfor %}" + _PROMPT


def _alternating(turn: str) -> str:
    return (
        _TOOLS + "{%- set ns = namespace(turns=messages, users=true) %}"
        "{%- if messages[0].role == 'system' %}"
        "{{- '[SYSTEM]' ~ messages[0].content ~ '[/SYSTEM]' }}"
        "{%- set ns.turns = messages[1:] %}{%- endif %}"
        "{%- for m in ns.turns %}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{%- if (m.role == 'user') != ns.users %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{%- set ns.users = not ns.users %}"
        "{%- elif m.role not in ('assistant', 'tool') %}"
        "{{- raise_exception('unknown role') }}{%- endif %}" + turn + "{%- endfor %}"
    )


TEMPLATES: Mapping[str, str] = {
    # Llama 3, Kimi K2, Qwen3-Coder: a header with whatever role there is.
    "headers": _each(_turn()),
    # Qwen3, GLM: roles that are known, others are dropped.
    "known": _each(_if(_KNOWN, _turn())),
    # Qwen3.5: a system message in front or an error.
    "first-only": _each(
        _if("m.role == 'system' and not loop.first", _raise("System message must come first."))
        + _if(_KNOWN, _turn(), _raise("Unexpected message role."))
    ),
    # gpt-oss, SmolLM3: the first message may be the system's, later ones are dropped.
    "first-silent": _each(_if("m.role in ('user', 'assistant', 'tool') or loop.first", _turn())),
    # Mistral: the system's in front; user and assistant take turns, but for calls and results.
    "alternating": _alternating(_turn()),
    # Mistral Nemo: the same, and nothing is said beside calls.
    "silent-calls": _alternating(_if("m.tool_calls", _CALLS + "{{- '<end>' }}", _turn())),
    # Gemma 3: every message is the user's or the model's, in turns; the system's is in the first.
    "parity": (
        "{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}"
        "{%- for m in turns %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{{- '<' ~ m.role ~ '>' }}{%- if loop.first and messages[0].role == 'system' %}"
        "{{- messages[0].content ~ '|' }}{%- endif %}{{- m.content ~ '<end>' }}"
        "{%- endfor %}" + _PROMPT
    ),
    # Gemma 2: no system at all.
    "no-system": _each(_if("m.role == 'system'", _raise("System role not supported"), _turn())),
    # DeepSeek V3: what the system says anywhere is collected in front.
    "hoisting": (
        "{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
        + _each("{%- if m.role != 'system' %}" + _turn() + "{%- endif %}")
    ),
    # Llama 2: a message of the system is written without a turn of its own.
    "glued": _each(_if("m.role == 'system'", "{{- m.content }}", _turn())),
    # No markup for tools: roles are all there is.
    "plain": "{%- for m in messages %}{{- m.role ~ ': ' ~ m.content ~ '\\n' }}{%- endfor %}",
}
