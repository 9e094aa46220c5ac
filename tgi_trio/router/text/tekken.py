"""Mistral's own tokenizers: tekken.json as a tokenizer.json, and the template of its prompts.

A folder with tekken.json alone has neither (Voxtral). Ids are those of the package mistral-common:
special tokens come first, then byte sequences by their ranks, of which the lowest is merged first.
Prompts are written as its `InstructTokenizerV7`, `V11` and `V13` do, which differ in tools alone.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError, tell_reason
from tgi_trio.router.text.byte_ranks import AddedToken, Json, write_ranks
from tgi_trio.whole_files import parse_json, read_file

FILE: Final = "tekken.json"
# Names of special tokens in tokenizer_config.json.
_NAMED: Final = {
    **{"bos_token": "<s>", "eos_token": "</s>"},
    **{"unk_token": "<unk>", "pad_token": "<pad>"},
}
# Of files before version 11 that list none, by their ids.
_OLDER_SPECIAL: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
_TEMPLATE: Final = """\
{%- macro write(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type == 'audio' %}
                {{- '[BEGIN_AUDIO][AUDIO]' }}
            {%- else %}
                {{- raise_exception('messages of this model hold text and audio') }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set seen = namespace(place=-1, system=false, audio=false, tools=[]) %}
{%- for message in messages %}
    {%- if message.role == 'user' and (seen.place < 0 or not TOOLS_FIRST) %}
        {%- set seen.place = loop.index0 %}
    {%- endif %}
    {%- if message.role == 'system' %}
        {%- set seen.system = true %}
    {%- endif %}
    {%- if '[AUDIO]' in write(message.content or '') %}
        {%- set seen.audio = true %}
    {%- endif %}
{%- endfor %}
{%- if seen.system and seen.audio and APART %}
    {{- raise_exception('this model takes no system message where audio is heard') }}
{%- endif %}
{%- for tool in tools or [] %}
    {%- set function = {'name': tool.function.name,
                        'description': tool.function.description or '',
                        'parameters': tool.function.parameters} %}
    {%- set seen.tools = seen.tools + [{'type': 'function', 'function': function}] %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' }}{{- write(message.content) }}{{- '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {%- if loop.index0 == seen.place and seen.tools %}
            {{- '[AVAILABLE_TOOLS]' }}{{- seen.tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' }}{{- write(message.content) }}{{- '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {%- if message.content %}
            {%- set said = write(message.content) %}
            {{- said.rstrip(' ') if message.content is string else said }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set name = call.function.name %}
            {%- set given = call.function.arguments %}
            {%- set arguments = given if given is string else given | tojson %}
CALLS
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' }}RESULT{{- write(message.content) }}{{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('roles are system, user, assistant and tool') }}
    {%- endif %}
{%- endfor %}
"""
_LISTED: Final = """\
            {{- '[TOOL_CALLS][' if loop.first else ', ' }}
            {{- '{"name": ' + name | tojson + ', "arguments": ' + arguments }}
            {{- ', "id": ' + call.id | tojson + '}' }}
            {{- ']' if loop.last else '' }}\
"""
_WITH_ID: Final = """\
            {{- '[TOOL_CALLS]' + name + '[CALL_ID]' + call.id + '[ARGS]' + arguments }}\
"""
_WITHOUT_ID: Final = """\
            {{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}\
"""
_RESULT_ID: Final = "{{- message.tool_call_id }}{{- '[TOOL_CONTENT]' }}"
# By version: tool calls, what a result begins with, whether tools stand at the first question.
_VERSIONS: Final[Mapping[str, tuple[str, str, bool]]] = {
    "v7": (_LISTED, _RESULT_ID, False),
    "v11": (_WITH_ID, _RESULT_ID, False),
    "v13": (_WITHOUT_ID, "", True),
}


def read_tekken(folder: Path) -> Json | None:
    """Return a folder's tekken.json, None if it has a tokenizer.json, or none of both.

    Raises ModelLoadError for a file of another form.
    """
    path = folder / FILE
    if (folder / "tokenizer.json").is_file() or not path.is_file():
        return None
    try:
        found = parse_json(read_file(path))
        if not {"pattern", "default_vocab_size"} <= found["config"].keys() or not found["vocab"]:
            raise KeyError("pattern, default_vocab_size or vocab")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = tell_reason(error, path)
        raise ModelLoadError(f"{path} is no tokenizer of Mistral's: {why}") from error
    whole: Json = found
    return whole


def name_special_tokens(tekken: Json) -> dict[str, str]:
    """Return special tokens with a role: name -> text."""
    own = set(_list_special(tekken))
    return {name: text for name, text in _NAMED.items() if text in own}


def write_template(tekken: Json) -> str | None:
    """Return the template of prompts; None: its version is not known."""
    version = _VERSIONS.get(str(tekken["config"].get("version")))
    if version is None:
        return None
    calls, result, first = version
    found = _TEMPLATE.replace("CALLS", calls).replace("RESULT{", f"{result}{{")
    return found.replace("TOOLS_FIRST", str(first)).replace("APART", str(not first))


def convert_tekken(tekken: Json) -> Json:
    """Return the content of tokenizer.json. Raises ModelLoadError."""
    special = _list_special(tekken)
    size = tekken["config"]["default_vocab_size"] - len(special)
    try:
        ranked = sorted(tekken["vocab"], key=lambda entry: entry["rank"])[:size]
        ranks = {b64decode(entry["token_bytes"]): i for i, entry in enumerate(ranked)}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"the vocabulary of tekken.json cannot be read: {error!r}") from error
    if len(ranks) != size or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ModelLoadError(
            f"the vocabulary of tekken.json has {len(ranks)} tokens, and {size} are wanted of it, "
            "each byte among them"
        )
    added = [AddedToken(i, text, special=True) for i, text in enumerate(special)]
    ids = {token: len(special) + rank for token, rank in ranks.items()}
    return write_ranks(ids, added, tekken["config"]["pattern"], [_NAMED["bos_token"]])


def _list_special(tekken: Json) -> list[str]:
    """Return special tokens by their ids; raises ModelLoadError."""
    count = tekken["config"].get("default_num_special_tokens", 1000)
    listed = tekken.get("special_tokens")
    try:
        if listed is None:
            known = dict(enumerate(_OLDER_SPECIAL))
        else:
            known = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
        found = [known.get(i, f"<SPECIAL_{i}>") for i in range(int(count))]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"special tokens of tekken.json cannot be read: {error!r}") from error
    if _NAMED["bos_token"] not in found or len(set(found)) != len(found):
        raise ModelLoadError(
            "special tokens of tekken.json lack the beginning of a text, or have one twice"
        )
    return found
