"""Chat templates, rendered as transformers renders them.

The sandbox, whitespace rules, filters, functions and preparation of messages are the same, so that
the prompt is the one that the model was tuned on. TGI's own engine differs in all of these (no
trim_blocks, sorted and escaped JSON, no keyword arguments).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tgi_trio.errors import CannotContinue, ConfigurationError, TemplateError
from tgi_trio.router.text.roles import Roles, probe_roles
from tgi_trio.whole_files import SMALL, read_text_file

TemplateMessage = Mapping[str, Any]
Clock = Callable[[], datetime]

_CONTINUE = "\ue000continue-here\ue000 "  # marks the end of the message to continue; ends in space
# Arguments of `ChatTemplate.render`: variables that no client, and no default, may set by name.
RESERVED: Final = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
_MARK = "Probe0x"  # a word that occurs in no template
_PROBE: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field, by precedence


class ChatTemplate:
    """The chat templates of one model; any thread may render, as nothing shared is changed."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        clock: Clock = datetime.now,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """Compile `sources` (name -> jinja2). `special_tokens` ("bos_token" ...) are variables.

        `defaults`: values of variables that are not given.

        Raises ConfigurationError for a template that does not compile.
        """
        environment = _environment(clock)
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._sources = dict(sources)
        self._templates: dict[str, jinja2.Template] = {}
        self._variables: dict[str, set[str]] = {}
        # Computed on demand: the roles that are rendered, and whether placeholders of kinds are.
        self._roles: dict[bool, Roles] = {}
        self._written: dict[tuple[str, str], bool] = {}
        for name, source in sources.items():
            try:
                parsed = environment.parse(source)
                self._variables[name] = meta.find_undeclared_variables(parsed)
                self._templates[name] = environment.from_string(parsed)
            except jinja2.TemplateSyntaxError as error:
                raise _does_not_compile(name, f"line {error.lineno}: {error.message}") from error
            # Jinja computes constants, and has Python compile the rest: either may fail in any way.
            except Exception as error:
                raise _does_not_compile(name, str(error) or type(error).__name__) from error
        self._lists: frozenset[str] = frozenset()  # templates that render only lists of parts
        self._lists = frozenset(name for name in sources if self._reads_lists_alone(name))

    @classmethod
    def from_flag(
        cls,
        text: str,
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, Any] | None = None,
    ) -> ChatTemplate:
        """Return the template of `--chat-template`: a file, or the template's text.

        Raises ConfigurationError.
        """
        if "{" in text:
            return cls({"default": text}, special_tokens, defaults=defaults)
        try:
            source = read_text_file(Path(text), SMALL)
        except (OSError, ValueError) as error:  # a name with a NUL, or not UTF-8
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(
                f"--chat-template {text} cannot be read: {why}; give a file with a Jinja template, "
                "or the template itself"
            ) from error
        return cls({"default": source}, special_tokens, defaults=defaults)

    def uses(self, variable: str, *, tools: bool = False) -> bool:
        """Return whether the template (the one for tools, if `tools`) reads `variable`."""
        return variable in self._variables.get(self._name(tools), ())

    @property
    def sources(self) -> Mapping[str, str]:
        """The texts of all templates, by name."""
        return self._sources

    def source(self, *, tools: bool = False) -> str:
        """Return the template's text (the one for tools, if `tools`); "" if there is none."""
        return self._sources.get(self._name(tools), "")

    def roles(self, *, tools: bool = False) -> Roles:
        """Return which turns the template renders unchanged, with tools or without."""
        if tools not in self._roles:
            shown = [_PROBE] if tools else None
            self._roles[tools] = probe_roles(lambda messages: self.render(messages, tools=shown))
        return self._roles[tools]

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for `messages`, which are plain JSON values.

        `continue_final_message` ends the prompt inside the last message; it excludes a generation
        prompt, which is then left out. Raises CannotContinue where the template does not write that
        message, and TemplateError with the template's own message.
        """
        name = self._name(tools is not None)
        template = self._templates.get(name)
        if template is None:
            raise TemplateError(self._explain_missing())
        if not messages:
            raise TemplateError("messages must not be empty")
        chat = [_prepare_message(message) for message in messages]
        if name in self._lists:
            chat = [_with_list(message) for message in chat]
        final = _mark_final(chat) if continue_final_message else ""
        try:
            text = template.render(
                {
                    **self._special_tokens,
                    **self._defaults,
                    **variables,
                    "messages": chat,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except Exception as error:  # a template is a program, which may fail in any way
            raise TemplateError(str(error) or type(error).__name__) from error
        return _cut_final(text, final) if continue_final_message else text

    def writes_parts(self, placeholder: str, kind: str = "image") -> bool:
        """Return whether an image in a message's list of parts is rendered as its placeholder.

        `kind`: the type of the part.
        """
        asked = placeholder, kind
        if asked not in self._written:
            self._written[asked] = self._tries_parts(placeholder, kind)
        return self._written[asked]

    def _tries_parts(self, placeholder: str, kind: str) -> bool:
        parts = [{"type": kind}, {"type": "text", "text": _MARK}]
        try:
            text = self.render([{"role": "user", "content": parts}])
            if text.count(placeholder) == 1 and _MARK not in text:
                # Some write the sounds of what users say, and no text, whatever it comes in.
                return _MARK not in self.render([{"role": "user", "content": _MARK}])
        except TemplateError:
            return False
        return text.count(placeholder) == 1

    def _reads_lists_alone(self, name: str) -> bool:
        """Return whether a template drops text outside a list, as some vision models' do."""
        template = self._templates[name]

        def reads(content: Any) -> bool:
            messages = [{"role": "user", "content": content}]
            with suppress(Exception):  # a template is a program, which may fail in any way
                return _MARK in template.render({**self._special_tokens, "messages": messages})
            return False

        return not reads(_MARK) and reads([{"type": "text", "text": _MARK}])

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._templates else "default"

    def _explain_missing(self) -> str:
        if not self._templates:
            return "template not found"
        names = ", ".join(sorted(self._templates))
        return f"template not found: there is no 'default' among {names}"


def _does_not_compile(name: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"The chat template '{name}' does not compile: {reason}. Give another with --chat-template."
    )


def _prepare_message(message: TemplateMessage) -> dict[str, Any]:
    """Return the message without nulls (templates print them), with reasoning by all its names."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning} | kept | {"reasoning_content": reasoning}


def _with_list(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content as a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's content; return that content."""
    message = chat[-1]
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE
        return content
    parts = list(content) if isinstance(content, list) else []
    for i in reversed(range(len(parts))):
        if isinstance(text := parts[i].get("text"), str):
            parts[i] = {**parts[i], "text": text + _CONTINUE}
            message["content"] = parts
            return text
    raise CannotContinue("continue_final_message needs text in the content of the final message")


def _cut_final(text: str, final: str) -> str:
    mark = _CONTINUE.strip()
    position = text.rfind(mark)
    if position < 0 or final.strip() not in text:
        raise CannotContinue(
            "continue_final_message is set, but the chat template does not render the final message"
        )
    if text.startswith(_CONTINUE, position):
        return text[:position]
    return text[:position].rstrip()  # the template trims contents, so this one is trimmed as well


class _GenerationTag(Extension):
    """`{% generation %}` marks text to train on; here it is an ordinary block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateDict:
    """Replaces `dict`, whose attributes as a type lead out of the sandbox."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _TemplateNamespace(jinja2.utils.Namespace):
    """Refuses names that begin with an underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **attributes: Any) -> None:  # `self` may be an attribute's name
        self, *positional = args
        attributes = dict(*positional, **attributes)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}: rename it")


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with keys in their order and without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
