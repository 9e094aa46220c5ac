"""The OpenAPI document, generated from the types of requests and replies."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

import msgspec
import orjson

from tgi_trio import __version__
from tgi_trio.router.http.dialects.anthropic import replies as anthropic
from tgi_trio.router.http.dialects.llama_cpp import replies as llama_cpp
from tgi_trio.router.http.documented_routes import NO_KEY, OPERATIONS, Operation
from tgi_trio.router.http.messages import replies, schema, service_replies, token_schema
from tgi_trio.router.http.messages.component_refs import COMPONENT
from tgi_trio.router.http.messages.tool_schema import NAMED

_TAG = "Text Generation Inference"
_REJECTED = {
    400: "The body is not JSON",
    408: "The body did not arrive in time",
    413: "The body is larger than --payload-limit",
    415: "The body is not declared as JSON, or is compressed",
    422: "The body has the wrong shape",
}
_FAILURES = {
    400: "The query cannot be read",
    404: "No such model",
    422: "Input validation error",
    424: "Generation failed",
    429: "Model is overloaded",
    500: "Internal error",
    503: "Not serving",
}
_NAME = {"type": "string", "pattern": "^[!-.0-~]+$"}  # no path matches a line break


@cache
def document() -> bytes:
    """Return the OpenAPI 3.1 document as JSON."""
    types = [
        each
        for operation in OPERATIONS
        for each in (operation.body, operation.reply, operation.events, operation.failure)
        if each is not None
    ]
    types += [replies.ErrorResponse, replies.OpenAIErrorResponse]
    # What bodies and replies name, but are not decoded to.
    types += [schema.VertexInstance, *NAMED]
    types += [
        token_schema.TokenizeRequest,
        token_schema.TokenizePromptRequest,
        token_schema.TokenizeChatRequest,
        anthropic.AnthropicModels,
        llama_cpp.InfillEvent,
        service_replies.ModelsInfo,
        service_replies.SimpleToken,
        service_replies.TokenizeResponse,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=COMPONENT)
    by_type = {str(each): found for each, found in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Text Generation Inference",
                "description": "tgi-trio: text generation on trio and shared-memory rings",
                "version": __version__,
            },
            "tags": [{"name": _TAG}],
            "paths": paths,
            "components": {"schemas": components},
        }
    )


def _operation(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.reply is not None:
        content[operation.reply_type] = {"schema": schemas[str(operation.reply)]}
    if operation.plain:
        content["text/plain"] = {"schema": {"type": "string"}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": schemas[str(operation.events)]}
    answers: dict[str, Any] = {"200": {"description": operation.summary}}
    if content:
        answers["200"]["content"] = content
    described: dict[str, Any] = {
        "tags": [_TAG],
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_')}",
        "responses": answers,
    }
    if parts := re.findall(r"{(\w+)}", operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _NAME} for name in parts
        ]
    if operation.query:
        described["parameters"] = [
            {"name": name, "in": "query", "required": False, "schema": _NAME}
            for name in operation.query
        ]
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {operation.body_type: {"schema": schemas[str(operation.body)]}},
        }
    answers.update(_failures(operation, schemas))
    return described


_OPENAI_ERRORS: Final = ("/v1/", "/infill")  # paths whose errors have OpenAI's shape


def _failures(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return what an operation answers when something is wrong, by status."""
    if operation.own_failures is not None:
        own = {"application/json": {"schema": schemas[str(operation.failure)]}}
        return {
            str(status): {"description": text, "content": own}
            for status, text in operation.own_failures.items()
        }
    openai = operation.path.startswith(_OPENAI_ERRORS)
    shape = replies.OpenAIErrorResponse if openai else replies.ErrorResponse
    error = {"application/json": {"schema": schemas[str(shape)]}}
    plain = {"text/plain": {"schema": {"type": "string"}}}
    answers: dict[str, Any] = {}
    if operation.body is not None:
        answers["401"] = {"description": NO_KEY, **({"content": error} if openai else {})}
        for status, text in _REJECTED.items():
            long = ", or the prompt is too long" if status == 400 and openai else ""
            content = error if openai else plain
            if operation.body_type == "multipart/form-data":
                text = text.replace("JSON", "such a form")
            answers[str(status)] = {"description": text + long, "content": content}
    for status in operation.failures:
        content = error
        if status == 422 and operation.body is not None and not openai:
            content = {**error, **plain}
        answers[str(status)] = {"description": _FAILURES[status], "content": content}
    return answers
