"""SageMaker's only route; the body determines the API."""

from __future__ import annotations

from tgi_trio.router.http.call import Call, Handler, Reply, Route
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import FirstFit
from tgi_trio.router.http.routes.chat import chat_completions
from tgi_trio.router.http.routes.completions import completions
from tgi_trio.router.http.routes.native import compat

_HANDLERS: dict[type, Handler] = {
    schema.CompatGenerateRequest: compat,
    schema.ChatRequest: chat_completions,
    schema.CompletionRequest: completions,
}
# In TGI's order: a body with both `inputs` and `messages` is one of POST /.
_BODY = FirstFit(
    dict(zip(("inputs", "messages", "prompt"), _HANDLERS, strict=True)),
    needs="needs `inputs`, `messages` or `prompt`",
)


async def invocations(call: Call) -> Reply:
    """POST /invocations: answered as POST /, chat or completions, the first whose body fits."""
    body = await call.read(_BODY)
    return await _HANDLERS[type(body)](call)


ROUTES = (Route("POST", "/invocations", invocations, images=True),)
