"""Templates in the manner of the families in use, compared with transformers' own rendering."""

from __future__ import annotations

import functools
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.shard.media.qwen3_asr_models import FIRST_TEMPLATE, TEMPLATE
from tgi_trio.errors import ConfigurationError, TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.turns import Turn, arrange_turns

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Whitespace control is the template engine's here: this needs trim_blocks and lstrip_blocks.
HEADINGS = """{{ bos_token }}
{% for message in messages %}
    {% if message['role'] == 'user' %}
### User:
{{ message['content'] | trim }}
    {% elif message['role'] == 'system' %}
### System:
{{ message['content'] }}
    {% else %}
### {{ message['role'] | title }}:
{% generation %}
{{ message['content'] }}{{ eos_token }}
{% endgeneration %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
### Assistant:
{% endif %}
"""

MISTRAL = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' ~ message['content'] ~ ' [/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + message['content'].strip() + eos_token }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = """
{%- if tools %}
    {{- 'Tools on ' + strftime_now('%d %b %Y') + ':\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' + (tool.function | tojson) + '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|' ~ message.role ~ '|>' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')' }}
        {%- endfor %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<image>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if documents %}{{ documents | length }} {{ documents[0].title }}{% endif %}
{{- unknown_variable }}{{ 'thinking' if enable_thinking | default(true) }}
"""

GEMMA = """{{ bos_token }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {{- message.content | trim }}{{ '<end_of_turn>\\n' }}
    {%- if message.reasoning_content is defined %}[{{ message.thinking }}]{% endif -%}
{%- endfor -%}
{{ dict(a=1).a }}{{ messages | map(attribute='role') | join(',') }}{{ messages[::-1][0].role }}
{%- macro turn(n) %}<{{ n }}>{% endmacro %}{{ turn(3) }}{{ range(3) | list }}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

TEMPLATES = {
    "chatml": CHATML,
    "headings": HEADINGS,
    "mistral": MISTRAL,
    "tools": TOOLS,
    "gemma": GEMMA,
}

USER = {"role": "user", "content": "  Hello, <b>how</b> are you? 😀 "}
ANSWER = {"role": "assistant", "content": "I'm doing great.\n"}
AGAIN = {"role": "user", "content": "Show me & tell me"}
SYSTEM = {"role": "system", "content": "You are a pirate."}
THOUGHTFUL = {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "tool_calls": None}
CHATS: dict[str, list[Any]] = {
    "one": [USER],
    "three": [USER, ANSWER, AGAIN],
    "system": [SYSTEM, USER, ANSWER, AGAIN],
    "reasoning": [USER, THOUGHTFUL, AGAIN],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's <weather> in Zürich & elsewhere",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"b": "Zürich", "a": 1}}}
    ],
}
RICH = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is "},
            {"type": "image"},
            {"type": "text", "text": "?"},
        ],
    },
    {"role": "skip", "content": "never"},
    CALL,
    {"role": "tool", "content": "7 °C", "tool_call_id": "0"},
    {"role": "stop", "content": ""},
    {"role": "user", "content": "never"},
]


def ours(source: str, messages: list[Any], **options: Any) -> str:
    return ChatTemplate({"default": source}, SPECIAL).render(messages, **options)


@functools.cache
def their_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    from tests.router.text.kinds import byte_level

    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL)


def theirs(source: str, messages: list[Any], **options: Any) -> str:
    tokenizer = their_tokenizer()
    options.setdefault("add_generation_prompt", True)
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, **options
    )
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_chats_are_rendered_as_transformers_does(name: str, chat: str, prompt: bool) -> None:
    source, messages = TEMPLATES[name], CHATS[chat]
    expected = theirs(source, messages, add_generation_prompt=prompt)
    assert ours(source, messages, add_generation_prompt=prompt) == expected
    assert len(expected) > len(messages[0]["content"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": [TOOL, TOOL]},
        {"documents": [{"title": "Tides", "text": "High at noon."}]},
        {"enable_thinking": False, "unknown_variable": "known", "bos_token": "other"},
    ],
)
def test_tools_parts_and_variables_are_rendered_as_transformers_does(
    options: dict[str, Any],
) -> None:
    assert ours(TOOLS, RICH, **options) == theirs(TOOLS, RICH, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["The answer is", "  The answer is  ", "a"])
def test_the_final_message_is_continued_as_transformers_does(name: str, content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    source = TEMPLATES[name]
    expected = theirs(source, messages, continue_final_message=True, add_generation_prompt=False)
    assert ours(source, messages, continue_final_message=True) == expected
    assert expected.rstrip().endswith(content.strip())


def test_the_final_message_may_be_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "Because "}, {"type": "image"}]
    messages = [USER, {"role": "assistant", "content": parts}]
    expected = theirs(TOOLS, messages, continue_final_message=True, add_generation_prompt=False)
    assert ours(TOOLS, messages, continue_final_message=True) == expected
    assert parts[0] == {"type": "text", "text": "Because "}  # the client's data is not touched


@pytest.mark.parametrize(
    "final", [{"role": "assistant"}, {"role": "assistant", "content": [{"type": "image"}]}]
)
def test_a_final_message_without_text_cannot_be_continued(final: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="needs text in the content"):
        ours(TOOLS, [USER, final], continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(TemplateError, match="does not render the final message"):
        ours("{{ messages[0].content }}", [USER, ANSWER], continue_final_message=True)


def test_a_template_speaks_for_itself() -> None:
    with pytest.raises(TemplateError) as caught:
        ours(MISTRAL, [USER, USER])
    assert str(caught.value) == "Roles must alternate: user, assistant, user, ..."


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",  # TypeError of the template's own making
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(_x=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for i in range(10 ** 7) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ dict.__subclasses__() }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_whatever_fails_inside_a_template_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError, match=r"."):
        ours(source, [USER])


def test_namespaces_and_dicts_work_as_templates_expect() -> None:
    source = "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.b }}"
    assert ours(source, [USER]) == "13"
    assert ours("{{ dict.fromkeys(['a']) }}{{ dict(a=2) }}", [USER]) == "{'a': None}{'a': 2}"


def test_the_clock_is_asked_for_dates() -> None:
    template = ChatTemplate(
        {"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}, clock=lambda: datetime(2031, 5, 4)
    )
    assert template.render([USER]) == "2031-05-04"


def test_no_template_and_no_messages() -> None:
    with pytest.raises(TemplateError, match=r"^template not found$"):
        ChatTemplate({}, SPECIAL).render([USER])
    with pytest.raises(TemplateError, match="no 'default' among rag"):
        ChatTemplate({"rag": "x"}, SPECIAL).render([USER])
    with pytest.raises(TemplateError, match="must not be empty"):
        ours(CHATML, [])


def test_the_template_for_tools_is_used_when_there_are_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools | length }}"}, SPECIAL)
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "1"
    assert not template.uses("tools")
    assert template.uses("tools", tools=True)


def test_uses_sees_what_a_template_reads() -> None:
    template = ChatTemplate({"default": TOOLS}, SPECIAL)
    assert template.uses("tools")
    assert template.uses("enable_thinking")
    assert not template.uses("add_generation_prompt")


def test_a_template_that_does_not_compile_names_line_and_flag() -> None:
    with pytest.raises(ConfigurationError, match=r"line 2.*--chat-template"):
        ChatTemplate({"default": "\n{% if %}"}, SPECIAL)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if messages %}{% break %}{% endif %}", "outside loop"),
        ("{{ 2 ** 99999 }}", "4300 digits"),
        ("{{ " + "(" * 500 + "1" + ")" * 500 + " }}", "recursion"),
    ],
)
def test_a_template_that_python_does_not_compile_is_refused_as_any_other(
    source: str, reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{reason}.*--chat-template"):
        ChatTemplate({"default": source}, SPECIAL)


def test_the_file_of_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ bos_token }}{{ messages[0].content }}")
    assert ChatTemplate.from_flag(str(path), SPECIAL).render([ANSWER]) == "<s>I'm doing great.\n"
    assert ChatTemplate.from_flag(path.read_text(), SPECIAL).render([ANSWER])[:3] == "<s>"
    path.write_bytes(b"\xff{{")
    for wrong in (tmp_path / "none", tmp_path, path, "a\0b"):
        with pytest.raises(ConfigurationError, match=r"--chat-template .* cannot be read: "):
            ChatTemplate.from_flag(str(wrong), SPECIAL)


def test_a_continued_message_excludes_a_generation_prompt() -> None:
    source = "{{ 'asked ' if add_generation_prompt }}{{ messages[-1].content }}"
    assert ours(source, [AGAIN]) == "asked " + AGAIN["content"]
    assert ours(source, [AGAIN], continue_final_message=True) == AGAIN["content"]


def test_defaults_hold_where_nothing_is_given() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    defaults = {"enable_thinking": False, "messages": "never"}
    for template in (
        ChatTemplate({"default": source}, {}, defaults=defaults),
        ChatTemplate.from_flag(source, {}, defaults),
    ):
        assert template.render([ANSWER]) == "False1"
        assert template.render([ANSWER], enable_thinking=True) == "True1"


def test_each_kind_of_part_is_tried_though_its_placeholder_is_anothers() -> None:
    source = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type in ('image', 'text') %}{{ p.text or '<media>' }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    for kinds in (("image", "audio"), ("audio", "image")):
        template = ChatTemplate({"default": source}, {})
        for kind in kinds:
            assert template.writes_parts("<media>", kind) is (kind == "image")


@pytest.mark.parametrize("source", [TEMPLATE, FIRST_TEMPLATE], ids=["-hf", "first"])
def test_a_template_that_reads_the_sounds_of_users_alone_writes_them(source: str) -> None:
    """Qwen3-ASR's: its system messages are not put into users' texts, which are not rendered."""
    template = ChatTemplate({"default": source}, {})
    assert template.writes_parts("<|audio_pad|>", "audio")
    assert not template.writes_parts("<|image_pad|>", "image")
    roles = template.roles(tools=False)
    assert roles.system
    system, sound = Turn("system", "Names: Ada"), Turn("user", "")
    assert arrange_turns([system, sound], roles)[0] == system


def test_a_template_that_reads_plain_texts_alone_writes_no_parts() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}<media>"
        "{% endif %}{% endfor %}"
    )
    assert not ChatTemplate({"default": source}, {}).writes_parts("<media>", "audio")
