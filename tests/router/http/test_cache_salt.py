"""`cache_salt`: from the body into the request, whose prefixes are then those of its salt alone."""

from __future__ import annotations

import pytest

from tests.router.http.served import served
from tests.router.http.test_deadlines import ROUTES

pytestmark = pytest.mark.trio


@pytest.mark.parametrize("path", ROUTES)
async def test_a_salt_reaches_the_cache(path):
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, ROUTES[path]({"cache_salt": "tenant-1"}))
    assert answer.status == 200
    assert {each.cache_salt for each in server.engine.submitted} == {"tenant-1"}


@pytest.mark.parametrize("path", ROUTES)
async def test_without_one_prefixes_are_everybodys(path):
    async with served() as server:
        client = await server.connect()
        for more in ({}, {"cache_salt": None}):
            assert (await client.post(path, ROUTES[path](more))).status == 200
    assert {each.cache_salt for each in server.engine.submitted} == {""}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("salt", "text"),
    [
        ("", "Expected `str` of length >= 1"),
        ("x" * 257, "Expected `str` of length <= 256"),
        (7, "Expected `str | null`, got `int`"),
    ],
)
async def test_bad_salts_are_refused(path, salt, text):
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, ROUTES[path]({"cache_salt": salt}))
    assert answer.status == 422
    assert "cache_salt: " + text in answer.body.decode()
    assert not server.engine.submitted and server.engine.permits == 0
