"""KServe's v2 inference protocol, as far as TGI supports it: texts as tensors of bytes."""

from __future__ import annotations

import orjson

from tgi_trio import __version__
from tgi_trio.router.http.answer_fields import resolve_model, use_model
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.routes import native, operations

_INFER = BodyReader(schema.InferRequest)
_MODEL = "/v2/models/<path:model>/versions/<version>"


async def server(call: Call) -> Reply:
    """GET /v2: metadata of the server."""
    return _metadata("text-generation-inference", __version__, ["health", "models", "metrics"])


async def ready(call: Call) -> Reply:
    """GET /v2/health/ready: 200 while generation makes progress."""
    reply = await operations.health(call)
    return Reply(b'{"live":true,"ready":true}') if reply.status == 200 else reply


async def model(call: Call) -> Reply:
    """GET the model's metadata. Raises Refused (404) for a model that is not served."""
    resolve_model(call, call.path["model"])
    return _metadata(call.path["model"], call.path["version"], ["infer", "ready"])


async def model_ready(call: Call) -> Reply:
    """GET whether the model is ready. Raises Refused (404) for one that is not served."""
    resolve_model(call, call.path["model"])
    return await ready(call)


async def infer(call: Call) -> Reply:
    """POST prompts; replies with their texts, in order."""
    request: schema.InferRequest = await call.read(_INFER)
    call.engine.metrics.inc("tgi_request_count")
    await use_model(call, call.path["model"])
    if len(request.inputs) != len(request.outputs):
        raise Refused(422, "Inputs and outputs length mismatch", "length mismatch")
    prompts = [_text(each) for each in request.inputs]
    parameters = native.read_parameters(request)
    answers = await native.generate_all(call, prompts, parameters)
    outputs = []
    for prompt, wanted, (best, *_) in zip(prompts, request.outputs, answers, strict=True):
        prefix = prompt if parameters.return_full_text else ""
        data = (prefix + best.outcome.text).encode()
        shape = [1, len(data)]
        outputs.append(
            {"name": wanted.name, "shape": shape, "datatype": "BYTES", "data": list(data)}
        )
    return Reply(orjson.dumps({"id": request.id, "outputs": outputs}))


def _text(tensor: schema.InferInput) -> str:
    try:
        return bytes(tensor.data).decode()
    except UnicodeDecodeError as error:
        raise Refused(422, str(error), "utf8") from error


def _metadata(name: str, version: str, extensions: list[str]) -> Reply:
    return Reply(orjson.dumps({"name": name, "version": version, "extensions": extensions}))


ROUTES = (
    Route("GET", "/v2", server, protected=False),
    Route("GET", "/v2/health/live", operations.live, protected=False),
    Route("GET", "/v2/health/ready", ready, protected=False),
    Route("GET", _MODEL, model, protected=False),
    Route("GET", f"{_MODEL}/ready", model_ready, protected=False),
    Route("POST", f"{_MODEL}/infer", infer),
)
