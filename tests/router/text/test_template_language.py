"""The language of chat templates, feature by feature, against transformers' own rendering."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.router.text.test_chat_template import TOOL, ours, theirs
from tgi_trio.errors import TemplateError

EACH = "{% for message in messages %}"
END = "{% endfor %}"
FEATURES = {
    "generation": EACH
    + "{% if message.role == 'assistant' %}{% generation %}{% set said = message.content %}"
    "{{ said }}{% endgeneration %}{% endif %}{{ said }}|" + END,
    "generation, trimmed": EACH
    + "{%- generation -%}\n  {{ message.role }}  \n{%- endgeneration -%}\n"
    + END,
    "generation in a namespace": "{% set ns = namespace(at=0) %}"
    + EACH
    + "{% generation %}{% set ns.at = ns.at + 1 %}{{ loop.index }}{% endgeneration %}"
    + END
    + "{{ ns.at }}",
    "refusals": EACH + "{% if message.role == 'tool' and loop.index > 3 %}"
    "{{ raise_exception('no ' + message.role) }}{% endif %}{{ message.role }}" + END,
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ messages | tojson(ensure_ascii=True) }}{{ tools | tojson(sort_keys=true) }}"
    "{{ {'b': 1.0, 'a': [none, true, '<&>']} | tojson(false, 1, (',', ' : '), true) }}",
    "json of nothing": "{{ nothing | tojson }}",
    "loop controls": EACH + "{% if loop.index0 % 2 %}{% continue %}{% endif %}{{ message.role }}"
    "{{ loop.previtem is defined }}{% if loop.index > 3 %}{% break %}{% endif %}" + END,
    "macros": "{%- macro show(text, end='.') -%}{{ text }}{{ end }}{{ kwargs }}{%- endmacro -%}"
    + EACH
    + "{{ show(message.role) }}{{ show(message.content, end='!', more=1) }}"
    + END,
    "a call block": "{% macro around() %}<{{ caller() }}>{% endmacro %}"
    "{% call around() %}{{ messages[0].role }}{% endcall %}",
    "namespaces": "{% set ns = namespace(count=0, roles=[]) %}"
    + EACH
    + "{% set ns.count = ns.count + 1 %}{% set ns.roles = ns.roles + [message.role] %}"
    + END
    + "{{ ns.count }}{{ ns.roles }}",
    "a hidden name": "{% set ns = namespace(_count=0) %}",
    "a list that changes": "{% set roles = [] %}{% set _ = roles.append('a') %}{{ roles }}",
    "what leads out": "{{ messages.__class__.__mro__ }}",
    "slices and filters": "{{ messages[::-1] | map(attribute='role') | join(',') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('content', 'none') | map(attribute='role') | list }}",
    "nulls": EACH
    + "{{ message.content is defined }}{{ message.get('content', '-') }}{{ message.tool_calls }}"
    "{{ 'tool_calls' in message }}{{ message.keys() | list }}" + END,
    "thoughts": EACH
    + "{{ message.reasoning_content }}|{{ message.thinking }}|{{ message.reasoning }}/"
    + END,
    "calls": EACH + "{% for call in message.tool_calls %}{% set given = call.function.arguments %}"
    "{{ call.function.name }}{% if given is mapping %}{% for key, value in given | items %}"
    "{{ key }}={{ value if value is string else value | tojson }};{% endfor %}"
    "{% else %}{{ given }}{% endif %}{% endfor %}" + END,
    "tests": EACH + "{{ message.content is string }}{{ message.content is iterable }}"
    "{{ message.content is mapping }}{{ message.role in ['user', 'tool'] }}" + END,
    "parts": EACH + "{% if message.content is string %}{{ message.content | trim }}{% else %}"
    "{% for part in message.content %}{{ part.type }}{{ part.text }}{% endfor %}{% endif %}" + END,
    "strings": EACH
    + "{% if message.content is string %}{{ message.content.strip().split('</think>')[-1][:3] }}"
    "{{ '%s:%d' % (message.role | title, message.content | length) }}"
    "{{ message.content.rstrip('\\n').replace('a', 'b') | upper }}{% endif %}" + END,
    "white space": "a\n  {% if true %}\n  b\n  {% endif %}\n{#- c -#}\n"
    + EACH
    + "\n {{- message.role }}\n"
    + END
    + "\n",
    "variables": "{{ bos_token }}{{ cls_token is defined }}{{ tools is none }}{{ documents }}"
    "{{ enable_thinking is defined and enable_thinking }}{{ add_generation_prompt }}",
    "blocks": "{% set shown %}{{ messages[0].role }}!{% endset %}{{ shown | length }}"
    "{% filter upper %}{{ shown }}{% endfilter %}{% with a = 1 %}{{ a }}{% endwith %}",
}
TEXTS = ["", "hi", " hi ", "a\n", "<think>x</think>\n\nyes", "é漢🙂\u2028", "<&'\"\\>", "{{ x }}"]
VALUES: list[Any] = [1, -0.0, 1e22, 10**20, None, True, "é", [1, "a"], {"k": {}}, []]


def talk(dice: random.Random) -> list[dict[str, Any]]:
    """Return a conversation: contents that are missing, null or lists, calls of every form."""
    messages = []
    for role in dice.choices(["system", "user", "assistant", "tool"], k=dice.randint(1, 6)):
        parts = [{"type": "text", "text": dice.choice(TEXTS)}, {"type": "image"}]
        content = dice.choice([*TEXTS, None, parts, []])
        message: dict[str, Any] = {"role": role, "content": content}
        if dice.random() < 0.1:
            del message["content"]
        if role == "assistant" and dice.random() < 0.6:
            given = {key: dice.choice(VALUES) for key in dice.sample("abcé", dice.randint(0, 3))}
            arguments = dice.choice([given, json.dumps(given), "not JSON"])
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            message["tool_calls"] = dice.choice([None, [], [call], [call, call]])
            for name in dice.sample(["reasoning_content", "thinking", "reasoning"], 2):
                message[name] = dice.choice([None, *TEXTS])
        messages.append(message)
    return messages


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_gives_what_transformers_gives(feature: str) -> None:
    """The same text, or an error of both."""
    source, dice = FEATURES[feature], random.Random(feature)
    for _ in range(12):
        messages = talk(dice)
        options: dict[str, Any] = dice.choice(
            [{}, {"tools": [TOOL]}, {"enable_thinking": True}, {"documents": [{"title": "t"}]}]
        )
        try:
            expected = theirs(source, messages, **options)
        except Exception:
            with pytest.raises(TemplateError):
                ours(source, messages, **options)
        else:
            assert ours(source, messages, **options) == expected
