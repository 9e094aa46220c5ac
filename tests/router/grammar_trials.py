"""What tries out grammars, for tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.system.server import children as children_of
from tgi_trio.demo import model_path
from tgi_trio.errors import ValidationError
from tgi_trio.router.grammar_checker import GrammarChecker, GrammarLimits
from tgi_trio.router.text import grammars

TOKENIZER = model_path() / "tokenizer.json"
# 5 s of compilation, which none of llguidance's own limits shortens.
MONSTER = grammars.json_schema({"type": "integer", "multipleOf": 1000003, "minimum": 0})
# This one takes 20 times as long as that, and memory all the while: a test that waits for it
# to meet another limit lets it have more (`ROOM`), or a fast processor meets that one first.
ENDLESS = grammars.json_schema({"type": "integer", "multipleOf": 20000003, "minimum": 0})
ROOM = 8 * 2**30


@asynccontextmanager
async def checker(workers: int = 1, file: Path = TOKENIZER, **limits: Any) -> AsyncIterator[Any]:
    one = GrammarChecker(file, GrammarLimits(**limits), workers)
    before = children()
    try:
        yield one
    finally:
        with trio.CancelScope(shield=True):
            await one.close()
    assert children() == before


def children() -> set[int]:
    """Child processes of this one, zombies too."""
    return set(children_of(os.getpid()))


async def wrong(one: GrammarChecker, grammar: str) -> str:
    with pytest.raises(ValidationError) as caught:
        await one.check(grammar)
    return str(caught.value)
