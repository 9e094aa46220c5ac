"""Routes without generation: health, information, metrics and documentation."""

from __future__ import annotations

from typing import Any

import orjson
import trio
from msgspec.json import encode

from tgi_trio import __version__
from tgi_trio.router.http.answer_fields import resolve_model, use_queried_model
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.dialects.anthropic import replies
from tgi_trio.router.http.docs_page import DOCS_PAGE
from tgi_trio.router.http.messages.error_shapes import OPENAI
from tgi_trio.router.http.messages.problems import Problem
from tgi_trio.router.http.openapi import document
from tgi_trio.router.http.resume import LOAD
from tgi_trio.router.telemetry.metrics import CONTENT_TYPE


async def health(call: Call) -> Reply:
    """GET /health, /ping and /: 200 while generation makes progress; a front gets the load."""
    healthy, reason = call.engine.health()
    if healthy:
        load = [] if call.front is None else [(LOAD, b"%d/%d" % call.engine.load())]
        return Reply(b"", content_type=b"", headers=load)
    problem = Problem(503, "unhealthy" if not reason else f"unhealthy: {reason}", "healthcheck")
    return Reply(problem.body(), status=problem.status)


async def live(call: Call) -> Reply:
    """GET /live: 200 unless only a new process can serve again; answered from memory at once."""
    return _verdict("live", *call.engine.alive())


async def ready(call: Call) -> Reply:
    """GET /ready: as /health, with the reason in the body."""
    return _verdict("ready", *call.engine.health())


def _verdict(name: str, good: bool, why: str) -> Reply:
    body = {name: True} if good else {name: False, "why": why}
    return Reply(orjson.dumps(body), status=200 if good else 503)


async def info(call: Call) -> Reply:
    """GET /info; `?model=` names an adapter, of whose thoughts it tells then."""
    await use_queried_model(call)
    card, limits, thoughts = call.engine.model, call.engine.limits, call.text_processor.thoughts
    return Reply(
        orjson.dumps(
            {
                "model_id": card.id,
                "model_sha": card.sha,
                "model_pipeline_tag": card.pipeline_tag,
                "max_concurrent_requests": limits.max_concurrent_requests,
                "max_best_of": limits.max_best_of,
                "max_stop_sequences": limits.max_stop_sequences,
                "max_input_tokens": limits.max_input_tokens,
                "max_total_tokens": limits.max_total_tokens,
                "validation_workers": limits.validation_workers,
                "max_client_batch_size": limits.max_client_batch_size,
                "router": "text-generation-router",  # clients recognise TGI by this
                "version": f"{_TGI}+trio.{__version__}",
                "sha": None,
                "docker_label": call.settings.docker_label,
                # Not in TGI.
                "adapters": list(call.engine.adapters.names),
                "reasoning": None if thoughts is None else thoughts.describe(),
                "settings": call.settings.shown,
            }
        )
    )


async def models(call: Call) -> Reply:
    """GET /v1/models, in OpenAI's shape, or in Anthropic's for its clients."""
    card = call.engine.model
    names = (card.id, *card.aliases, *call.engine.adapters.names)
    if call.from_anthropic:
        listed = [_anthropic_model(call, name) for name in names]
        return Reply(encode(replies.AnthropicModels(listed, names[0], names[-1])))
    data = [_model_info(call, name) for name in names]
    return Reply(orjson.dumps({"object": "list", "data": data}))


async def model(call: Call) -> Reply:
    """GET /v1/models/{id}. Raises Refused (404) for a name that is not served."""
    name = resolve_model(call, call.path["name"])
    if call.from_anthropic:
        return Reply(encode(_anthropic_model(call, name)))
    return Reply(orjson.dumps(_model_info(call, name)))


def _anthropic_model(call: Call, name: str) -> replies.AnthropicModel:
    limits = call.engine.limits
    return replies.AnthropicModel(name, name, limits.max_input_tokens, limits.max_total_tokens - 1)


def _model_info(call: Call, name: str) -> dict[str, Any]:
    """Return OpenAI's Model, with the fields that vLLM adds.

    `root` is the model's own name; an adapter is its own root and has the model as parent.
    """
    card = call.engine.model
    adapter = call.engine.adapters.serves(name)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": card.id,
        "root": name if adapter else card.id,
        "parent": card.id if adapter else None,
        "max_model_len": call.engine.limits.max_total_tokens,
    }


async def version(call: Call) -> Reply:
    """GET /version, as in vLLM."""
    return Reply(orjson.dumps({"version": __version__}))


async def metrics(call: Call) -> Reply:
    """GET /metrics, for Prometheus."""
    return Reply(call.engine.metrics.render(), content_type=CONTENT_TYPE.encode())


async def openapi(call: Call) -> Reply:
    """GET /api-doc/openapi.json."""
    return Reply(await trio.to_thread.run_sync(document))  # it takes 30 ms to write, once


async def docs(call: Call) -> Reply:
    """GET /docs: the OpenAPI document as a page that loads nothing from other servers."""
    return Reply(DOCS_PAGE, content_type=b"text/html; charset=utf-8")


# The version of TGI whose API is spoken. Clients allow for what a version of TGI does and does not
# know, by the part of /info's `version` before the `+` (llama-index: calls of tools from 2.0.1 on).
_TGI = "3.3.6"

# Also served at the port of --prometheus-port.
WATCHED = (
    Route("GET", "/health", health, protected=False),
    Route("GET", "/live", live, protected=False),
    Route("GET", "/ready", ready, protected=False),
    Route("GET", "/metrics", metrics, protected=False),
)

# What HAProxy's `option httpchk` sends by default.
PROBE = Route("OPTIONS", "/", health, protected=False)

ROUTES = (
    *WATCHED,
    Route("GET", "/", health, protected=False),
    Route("GET", "/ping", health, protected=False),
    Route("GET", "/info", info, protected=False),
    Route("GET", "/version", version, protected=False),
    Route("GET", "/v1/models", models, protected=False, dialect=OPENAI, anthropic=True),
    Route("GET", "/v1/models/<path:name>", model, protected=False, dialect=OPENAI, anthropic=True),
    Route("GET", "/api-doc/openapi.json", openapi, protected=False),
    Route("GET", "/docs", docs, protected=False),
)
