"""SageMaker's one route for everything: the body says which API is meant."""

from __future__ import annotations

from tgi_trio.router.http import schema
from tgi_trio.router.http.errors import BodyRejected
from tgi_trio.router.http.exchange import Call, Handler, Reply, Route
from tgi_trio.router.http.routes.chat import chat_completions
from tgi_trio.router.http.routes.completions import completions
from tgi_trio.router.http.routes.native import compat

# In TGI's order: a body with both `inputs` and `messages` is POST /'s.
_SHAPES: tuple[tuple[str, schema.BodyReader, Handler], ...] = (
    ("inputs", schema.BodyReader(schema.CompatGenerateRequest), compat),
    ("messages", schema.BodyReader(schema.ChatRequest), chat_completions),
    ("prompt", schema.BodyReader(schema.CompletionRequest), completions),
)


async def invocations(call: Call) -> Reply:
    """POST /invocations: what POST /, chat or completions make of it, by the first that fits."""
    problem: BodyRejected | None = None
    for name, reader, handler in _SHAPES:
        try:
            reader.read(call.headers, call.body)
        except BodyRejected as error:
            if error.status != 422:
                raise
            if f"missing required field `{name}`" not in str(error):
                problem = problem or error  # of the API that was meant
            continue
        return await handler(call)
    raise problem or schema.invalid("body", "needs `inputs`, `messages` or `prompt`")


ROUTES = (Route("POST", "/invocations", invocations),)
