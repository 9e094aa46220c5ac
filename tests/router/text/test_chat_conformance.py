"""The prompts that TGI's own tests expect of well-known families, from templates written for them.

Together the templates need what templates in use need: slices, namespaces, loop variables, filters,
conditions inside expressions, and whitespace that is the template's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tgi_trio.router.text.chat_template import ChatTemplate

SYSTEM = "You are a friendly chatbot who always responds in the style of a pirate"
ASK = "Hello, how are you?"
ANSWER = "I'm doing great. How can I help you today?"
AGAIN = "I'd like to show off how chat templating works!"
CHAT = [
    {"role": "user", "content": ASK},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": AGAIN},
]
PIRATE = [{"role": "system", "content": SYSTEM}, *CHAT]

EACH = "{% for message in messages %}"
END = "{% endfor %}"
CHATML = (
    EACH + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    + END + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)  # fmt: skip
CHATML_CHAT = (
    f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    f"<|im_start|>user\n{AGAIN}<|im_end|>\n"
)


class Case(NamedTuple):
    """A family: its template, the prompt it must give, and from what."""

    template: str
    expected: str
    bos: str = "<s>"
    eos: str = "</s>"
    prompted: bool = False
    messages: list[dict[str, Any]] = CHAT


def mistral(after_answer: str) -> str:
    return (
        "{{ bos_token }}" + EACH
        + "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ message['content'] + eos_token" + after_answer + " }}{% endif %}" + END
    )  # fmt: skip


ZEPHYR = (
    EACH + "{{ '<|' ~ message.role ~ '|>\\n' + message.content + eos_token }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}" + END
)

CASES = {
    "chatml": Case(CHATML, CHATML_CHAT),
    "chatml that begins": Case("{{ bos_token }}" + CHATML, "<bos>" + CHATML_CHAT, bos="<bos>"),
    "chatml, prompted": Case(CHATML, CHATML_CHAT + "<|im_start|>assistant\n", prompted=True),
    "blenderbot": Case(
        EACH + "{{ ' ' if message.role == 'user' }}{{ message.content }}"
        "{{ '  ' if not loop.last }}" + END + "{{ eos_token }}",
        f" {ASK}  {ANSWER}   {AGAIN}</s>",
    ),
    "bloom": Case(
        EACH + "{{ message.content }}{{ eos_token }}" + END, f"{ASK}</s>{ANSWER}</s>{AGAIN}</s>"
    ),
    "llama": Case(
        "{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}"
        "{% set system = messages[0]['content'] %}{% else %}{% set turns = messages %}{% endif %}"
        "{% for turn in turns %}"
        "{% if loop.index0 == 0 and system is defined %}"
        "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + turn.content %}"
        "{% else %}{% set content = turn.content %}{% endif %}"
        "{% if turn.role == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}" + END,
        f"<s>[INST] <<SYS>>\n{SYSTEM}\n<</SYS>>\n\n{ASK} [/INST] {ANSWER} </s>"
        f"<s>[INST] {AGAIN} [/INST]",
        prompted=True,
        messages=PIRATE,
    ),
    "zephyr": Case(
        ZEPHYR,
        f"<|system|>\n{SYSTEM}</s><|user|>\n{ASK}</s><|assistant|>\n{ANSWER}</s>"
        f"<|user|>\n{AGAIN}</s>",
        messages=PIRATE,
    ),
    "zephyr, prompted": Case(
        ZEPHYR,
        f"<|system|>\n{SYSTEM}</s><|user|>\n{ASK}</s><|assistant|>",
        prompted=True,
        messages=PIRATE[:2],
    ),
    "mistral": Case(
        mistral(" + ' '"), f"<s>[INST] {ASK} [/INST]{ANSWER}</s> [INST] {AGAIN} [/INST]"
    ),
    "mixtral": Case(mistral(""), f"<s>[INST] {ASK} [/INST]{ANSWER}</s>[INST] {AGAIN} [/INST]"),
    "openchat": Case(
        "{{ bos_token }}" + EACH + "{{ 'GPT4 Correct ' + message.role | title + ': ' "
        "+ message.content + '<|end_of_turn|>' }}" + END,
        f"<s>GPT4 Correct User: {ASK}<|end_of_turn|>GPT4 Correct Assistant: {ANSWER}"
        f"<|end_of_turn|>GPT4 Correct User: {AGAIN}<|end_of_turn|>",
    ),
    "codellama": Case(
        "{{ bos_token }}" + EACH + "{{ 'Source: ' + message.role | trim + '\\n\\n ' "
        "+ message.content | trim + ' <step> ' }}" + END
        + "{{ 'Source: assistant\\nDestination: user\\n\\n ' }}",
        f"<s>Source: user\n\n {ASK} <step> Source: assistant\n\n {ANSWER} <step> "
        f"Source: user\n\n {AGAIN} <step> Source: assistant\nDestination: user\n\n ",
    ),
    "headings": Case(
        EACH + "{{ '### ' + message.role | capitalize + ':\\n' + message.content }}" + END,
        f"### User:\n{ASK}### Assistant:\n{ANSWER}### User:\n{AGAIN}",
    ),
    "qwen": Case(
        EACH + "{% if loop.first and messages[0].role != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
        "{% if add_generation_prompt or not loop.last %}{{ '<|im_end|>' + '\\n' }}{% endif %}"
        + END,
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        + CHATML_CHAT.removesuffix("<|im_end|>\n"),
    ),
    "deepseek": Case(
        "{{ bos_token }}" + EACH + "{% if message.role == 'user' %}"
        "{{ 'User: ' + message.content + '\\n\\n' }}"
        "{% else %}{{ 'Assistant: ' + message.content + eos_token }}{% endif %}" + END,
        f"<begin>User: {ASK}\n\nAssistant: {ANSWER}<end>User: {AGAIN}\n\n",
        bos="<begin>",
        eos="<end>",
    ),
    "danube": Case(
        EACH + "{{ '<|prompt|>' if message.role == 'user' else '<|answer|>' }}"
        "{{ message.content }}{{ eos_token }}" + END,
        f"<|prompt|>{ASK}</s><|answer|>{ANSWER}</s><|prompt|>{AGAIN}</s>",
    ),
    "deepseek coder": Case(
        "{% set ns = namespace(found=false) %}" + EACH
        + "{% if message.role == 'system' %}{% set ns.found = true %}{% endif %}" + END
        + "{{ bos_token }}{% if not ns.found %}{{ 'You are a programmer.\\n' }}{% endif %}" + EACH
        + "{% if message.role == 'user' %}{{ '### Instruction:\\n' + message.content + '\\n' }}"
        "{% else %}{{ '### Response:\\n' + message.content + '\\n<|EOT|>\\n' }}{% endif %}" + END,
        f"<s>You are a programmer.\n### Instruction:\n{ASK}\n### Response:\n{ANSWER}\n<|EOT|>\n"
        f"### Instruction:\n{AGAIN}\n",
    ),
    "falcon": Case(
        EACH + "{% if loop.previtem is defined and loop.previtem.role == 'assistant' %}"
        "{{ eos_token }}{% endif %}"
        "{{ ('[INST] ' if message.role == 'user' else ' [RESP] ') + message.content }}" + END,
        f"[INST] {ASK} [RESP] {ANSWER}<|endoftext|>[INST] {AGAIN}",
        eos="<|endoftext|>",
    ),
    "smaug": Case(
        "{% for i in range(messages | length) %}{% set message = messages[i] %}"
        "{% if message.role == 'user' %}{{ (bos_token + '[INST] ' if i else '') "
        "+ message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}" + END,
        f"{ASK} [/INST] {ANSWER} </s><s>[INST] {AGAIN} [/INST]",
    ),
    "pivot": Case(
        "{% set said = messages | selectattr('role', 'equalto', 'system') | list %}"
        "{{ said[-1].content + ' ' + (said | last).content + ' ' if said | length > 0 else '' }}"
        "{% for turn in messages[said | length:] %}"
        "{{ '### ' + ('Instruction' if turn.role == 'user' else 'Response') + ': ' "
        "+ turn.content }}" + END,
        f"{SYSTEM} {SYSTEM} ### Instruction: {ASK}### Response: {ANSWER}### Instruction: {AGAIN}",
        messages=PIRATE,
    ),
    "llama with a tool's result": Case(
        EACH + "{% if message.role == 'tool' %}{{ '<|ipython|>' }}"
        "{{ 'TOOL CALL ID: ' + message.tool_call_id + '\\n\\n' }}"
        "{% if message.content is iterable %}{{ message.content | tojson }}{% endif %}"
        "{% else %}{{ '<|' + message.role + '|>' + message.content }}{% endif %}" + END
        + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        f"<|user|>{ASK}<|ipython|>TOOL CALL ID: 0\n\n\"6.7\"<|assistant|>",
        prompted=True,
        messages=[CHAT[0], {"role": "tool", "tool_call_id": "0", "content": "6.7"}],
    ),
    "a loop that is left": Case(
        EACH + "{% if loop.index == 2 %}{% break %}{% endif %}{{ message.content }}" + END,
        ASK,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_prompt_of_a_family(name: str) -> None:
    case = CASES[name]
    template = ChatTemplate(
        {"default": case.template}, {"bos_token": case.bos, "eos_token": case.eos}
    )
    assert template.render(case.messages, add_generation_prompt=case.prompted) == case.expected
