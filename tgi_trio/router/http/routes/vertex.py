"""Vertex AI: prompts and conversations in one call, answered by texts."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.errors import ValidationError
from tgi_trio.router.http.answer_fields import resolve_model, use_model
from tgi_trio.router.http.call import Call, HttpSettings, Reply, Route
from tgi_trio.router.http.call_validation import validate_request
from tgi_trio.router.http.generation import collect_results, take_permits
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader, FirstFit
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.messages.render import text_json
from tgi_trio.router.http.routes import chat, native
from tgi_trio.router.http.routes.operations import health
from tgi_trio.router.request import Request

_VERTEX = BodyReader(schema.VertexRequest)
_INSTANCE = FirstFit(
    {"inputs": schema.VertexInstance, "messages": schema.ChatRequest},
    needs="needs `inputs` or `messages`",
)


async def predict(call: Call) -> Reply:
    """POST /vertex: the text of every instance, in order."""
    body: schema.VertexRequest = await call.read(_VERTEX)
    instances = [
        _INSTANCE.read(call.headers, each, f"instances[{i}]")
        for i, each in enumerate(body.instances)
    ]
    call.engine.metrics.inc("tgi_request_count")
    if not instances:
        raise Refused(422, "Input validation error", "Input validation error")
    take_permits(call, len(instances))
    requests = [await _request(call, instance) for instance in instances]
    results = await collect_results(call, requests, keep_tokens=False)
    texts = b",".join([text_json(result.outcome.text) for result in results])
    return Reply(b'{"predictions":[%b]}' % texts)


async def _request(call: Call, instance: schema.VertexInstance | schema.ChatRequest) -> Request:
    """Return the request of one instance; as in TGI, a prompt is always sampled."""
    if isinstance(instance, schema.ChatRequest):
        await use_model(call, instance.model)
        if instance.n not in (None, 1):
            raise ValidationError(
                f"an instance has one prediction, and no `n`. Given: {instance.n}"
            )
        prepared = await chat.prepare_chat(call, instance)
        sampling = replace(prepared.parameters, top_n_tokens=None, decoder_input_details=False)
        return await replace(prepared, parameters=sampling).validate(call, instance)
    resolve_model(call, None)  # an earlier chat may have named a model
    parameters = native.read_parameters(instance)
    sampling = replace(await native.to_parameters(call, parameters), do_sample=True, best_of=None)
    return await validate_request(
        call, native.find_images(call, instance.inputs), sampling, parameters
    )


def vertex_routes(http: HttpSettings) -> tuple[Route, ...]:
    """Return the routes that Vertex AI's environment asks for, if any."""
    found: list[Route] = []
    if http.predict_route is not None:
        found.append(Route("POST", http.predict_route, predict, images=True))
    if http.health_route is not None:
        found.append(Route("GET", http.health_route, health, protected=False))
    return tuple(found)


ROUTES = (Route("POST", "/vertex", predict, images=True),)
