"""Guided generation through the whole server: what is asked for is what comes."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import validate

from tests.system.client import generate, post
from tests.system.server import ServerProcess, children, command, serving, wait_gone

pytestmark = pytest.mark.system

# Small, because the embedded model knows nothing of JSON: what is open ends soon.
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SAMPLED = {"do_sample": True, "max_new_tokens": 400}


def answer(url: str, kind: str, value: object, **parameters: object) -> str:
    grammar = {"type": kind, "value": value}
    result = generate(url, "Tell me", grammar=grammar, details=True, **SAMPLED, **parameters)
    assert result["details"]["finish_reason"] == "eos_token"
    return str(result["generated_text"])


@pytest.mark.parametrize("seed", range(3))
def test_every_finished_answer_is_in_its_grammar(demo: ServerProcess, seed: int) -> None:
    person = json.loads(answer(demo.url, "json", PERSON, seed=seed, temperature=1.5))
    validate(person, PERSON)
    pattern = r"\d{1,3}(\.\d{1,3}){3}"
    assert re.fullmatch(pattern, answer(demo.url, "regex", pattern, seed=seed))
    options = ["maybe", "yes, of course", "no"]
    assert answer(demo.url, "choice", options, seed=seed, top_p=0.9) in options
    lark = 'start: "a" start? "b"'  # without a bound: so hot that every way on is as likely
    nested = answer(demo.url, "lark", lark, seed=seed, temperature=50.0)
    assert nested == "a" * (len(nested) // 2) + "b" * (len(nested) // 2)


def test_an_object_ends_behind_the_properties_that_are_listed(demo: ServerProcess) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string", "maxLength": 5}}}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    for seed in range(4):
        text = answer(demo.url, "json", schema, seed=seed)  # not by its length
        found = json.loads(text)
        assert set(found) == {"a"} and set(found["a"]) <= {"b"}


def test_a_seed_gives_the_same_alone_and_among_others(demo: ServerProcess) -> None:
    alone = [answer(demo.url, "json", PERSON, seed=seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as threads:
        plain = [threads.submit(generate, demo.url, "Hello", max_new_tokens=60) for _ in range(6)]
        together = [
            threads.submit(answer, demo.url, "json", PERSON, seed=seed) for seed in range(6)
        ]
        assert [each.result() for each in together] == alone
        assert len({each.result()["generated_text"] for each in plain}) == 1


def test_drafts_and_a_crash_of_the_shard_change_nothing(demo: ServerProcess) -> None:
    pattern = "([a-z]{2,5} (yes|no), ){25}end"
    alone = [answer(demo.url, "regex", pattern, seed=seed) for seed in range(4)]
    assert all(re.fullmatch(pattern, text) for text in alone)
    with serving("--speculate", "3") as server, ThreadPoolExecutor(4) as threads:
        again = [threads.submit(answer, server.url, "regex", pattern, seed=s) for s in range(4)]
        server.wait_metric('tgi_batch_inference_count{method="decode"}', 3)
        os.kill(server.shards()[0], signal.SIGKILL)
        assert [each.result() for each in again] == alone
        server.wait_metric("tgi_shard_restarts", 1)
        assert server.metric("tgi_shard_restarts") == 1


def test_openais_json_schema_in_stream_and_body(demo: ServerProcess) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
        "seed": 4,
        "max_tokens": 200,
    }
    url = f"{demo.url}/v1/chat/completions"
    choice = post(url, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    validate(json.loads(choice["message"]["content"]), PERSON)
    lines = post(url, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == choice["message"]["content"]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json", {"properties": {"a": {"type": "objekt"}}}, "Invalid type: objekt"),
        ("regex", "([", "unclosed character class"),
        ("lark", "start: nothing", 'unknown name: "nothing"'),
        ("json", {"enum": ["x" * 70_000]}, "--max-grammar-bytes"),
    ],
)
def test_bad_and_large_grammars_are_422(
    demo: ServerProcess, kind: str, value: object, text: str
) -> None:
    parameters = {"grammar": {"type": kind, "value": value}}
    refused = post(f"{demo.url}/generate", json={"inputs": "x", "parameters": parameters})
    assert refused.status_code == 422 and text in refused.json()["error"]
    assert refused.json()["error_type"] == "validation"


def test_a_grammar_that_takes_too_long_is_refused(demo: ServerProcess) -> None:
    """A long trial is for idle cores: where there is none, nothing has been found out."""
    grammar = {"type": "json", "value": {"type": "integer", "multipleOf": 1000003}}
    refused = post(f"{demo.url}/generate", json={"inputs": "x", "parameters": {"grammar": grammar}})
    error = refused.json()["error"]
    assert "--max-grammar-seconds" in error
    if "too busy to try" in error:
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
    else:
        assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_that_check_grammars_end_with_the_server(number: int) -> None:
    with serving(fake="{}") as server:
        generate(server.url, "x", grammar={"type": "choice", "value": ["a", "b"]}, max_new_tokens=1)
        checkers = [p for p in children(server.process.pid) if "grammars.checking" in command(p)]
        assert checkers
        server.signal(number)
        server.wait()
        assert not wait_gone(checkers)


def test_disable_grammar_support() -> None:
    with serving("--disable-grammar-support", fake="{}") as server:
        grammar = {"type": "regex", "value": "a"}
        refused = post(
            f"{server.url}/generate",
            json={"inputs": "x", "parameters": {"grammar": grammar}},
        )
    assert refused.status_code == 422
    assert refused.json()["error"] == "Input validation error: grammar is not supported"
