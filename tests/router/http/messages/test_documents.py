"""Bodies of every kind are read or rejected, and the OpenAPI document is whole."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.http.messages.problems import BodyRejected
from tgi_trio.router.http.openapi import document
from tgi_trio.router.http.wire.headers import header_block


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["inputs", "parameters", "messages", "stop", "prompt", "seed", "role"]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=10,
    ).map(lambda value: orjson.dumps(value, default=str) if not _huge(value) else b"{}")
)
def test_any_body_is_read_or_rejected(body):
    headers = {b"content-type": b"application/json"}
    for shape in (schema.GenerateRequest, schema.ChatRequest, schema.CompletionRequest):
        try:
            assert isinstance(BodyReader(shape).read(headers, body), shape)
        except BodyRejected as error:
            assert error.status in (400, 422)


def _huge(value) -> bool:
    if isinstance(value, int):
        return not -(2**63) <= value < 2**64
    if isinstance(value, dict):
        return any(map(_huge, value.values()))
    return isinstance(value, list) and any(map(_huge, value))


def test_every_reference_of_the_document_leads_somewhere():
    api = orjson.loads(document())
    found = set()

    def walk(node):
        if isinstance(node, dict):
            if "$ref" in node:
                found.add(node["$ref"].removeprefix("#/components/schemas/"))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(api)
    assert found <= set(api["components"]["schemas"])
    assert {"GenerateRequest", "GenerateParameters", "ChatRequest", "ErrorResponse"} <= found


def test_no_type_is_called_by_where_its_code_lies():
    """As msgspec calls two of one name: generated clients would have our folders in their names."""
    names = orjson.loads(document())["components"]["schemas"]
    assert not [name for name in names if not name.isidentifier()]


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: x", b"a\nb", b"a\rb", b"a\0b"])
def test_no_value_breaks_out_of_its_header(value):
    assert header_block([(b"x", b"fine"), (b"y", b"")]) == b"x: fine\r\ny: \r\n"
    with pytest.raises(ValueError, match="may not contain"):
        header_block([(b"x", value)])
