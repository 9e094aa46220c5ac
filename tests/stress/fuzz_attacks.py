"""Requests that no honest client sends, drawn at random: what `fuzz.py` throws at a server."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = (
    "/",
    "/generate",
    "/generate_stream",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/tokenize",
    "/detokenize",
    "/chat_tokenize",
    "/invocations",
    "/vertex",
    "/v2/models/tgi/versions/1/infer",
)
MESSAGES = [{"role": "user", "content": "x"}]
BODY: dict[str, Any] = {
    "inputs": "x",
    "messages": MESSAGES,
    "prompt": "x",
    "input": "x",
    "instances": [{"inputs": "x"}],
    "max_tokens": 3,
    "parameters": {"max_new_tokens": 3},
}
FIELDS = (
    *("inputs", "parameters", "messages", "prompt", "instances", "stream", "stop", "seed", "n"),
    *(
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "logprobs",
        "top_logprobs",
        "best_of",
        "tools",
    ),
    *("response_format", "tool_choice", "logit_bias", "stream_options", "echo", "model", "timeout"),
    *("priority", "min_tokens", "truncate", "details", "grammar", "adapter_id", "watermark"),
)
NUMBERS = (
    *("0", "-1", "-0", "1e400", "-1e400", "1e-400", "0.1", "2147483648", "4294967296", "NaN"),
    *("18446744073709551615", "18446744073709551616", "1" * 400, "-" + "9" * 5000, "1e", "0x1"),
)


@dataclass(frozen=True)
class Attack:
    """What one connection sends."""

    kind: str
    data: bytes
    filler: int = 0  # bytes sent behind `data`, for as long as nobody answers
    answers: int = 1  # answers that must come, unless the server hangs up; 0: as it likes
    leave: str = ""  # "close" or "reset": do not wait for the answer


def request(
    path: str, body: bytes, method: str = "POST", headers: str = "", length: int | None = None
) -> bytes:
    """Return an HTTP/1.1 request; `headers` are whole lines."""
    length = len(body) if length is None else length
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{headers}"
    if "content-type" not in headers:
        head += "content-type: application/json\r\n"
    return head.encode("utf-8", "surrogateescape") + b"\r\n" + body


def a_value(rng: random.Random, depth: int = 2) -> Any:
    """Return some JSON value."""
    leaf = rng.choice((None, True, False, 0, -1, 1, 2**31, 2**64, 0.5, "", "x", "\0", "é" * 9))
    if depth == 0 or rng.random() < 0.6:
        return leaf
    if rng.random() < 0.5:
        return [a_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(FIELDS): a_value(rng, depth - 1) for _ in range(rng.randrange(4))}


def broken_json(rng: random.Random) -> Attack:
    body = bytearray(json.dumps({**BODY, "stream": rng.random() < 0.5}).encode())
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(body))
        match rng.randrange(3):
            case 0:
                body[at] = rng.randrange(256)
            case 1:
                del body[at:]
                body += b"x"
            case 2:
                body[at:at] = rng.randbytes(rng.randrange(1, 9))
    return Attack("broken JSON", request(rng.choice(PATHS), bytes(body)))


def wrong_types(rng: random.Random) -> Attack:
    body = copy.deepcopy(BODY)
    for name in rng.sample(FIELDS, rng.randrange(1, 5)):
        where = body if rng.random() < 0.6 else body.setdefault("parameters", {})
        if isinstance(where, dict):
            where[name] = a_value(rng)
    return Attack("wrong types", request(rng.choice(PATHS), json.dumps(body).encode()))


def huge_numbers(rng: random.Random) -> Attack:
    name, number = rng.choice(FIELDS), rng.choice(NUMBERS)
    text = json.dumps(BODY)[:-1] + f', "{name}": {number}}}'
    if rng.random() < 0.5:
        text = text.replace('"max_new_tokens": 3', f'"{name}": {number}')
    return Attack("huge numbers", request(rng.choice(PATHS), text.encode()))


def deep_nesting(rng: random.Random) -> Attack:
    depth = 10 ** rng.randrange(1, 6)
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('{"messages":[', "]}")))
    nest = opening * depth + "1" + closing * (depth if rng.random() < 0.5 else 0)
    text = nest if rng.random() < 0.3 else f'{{"inputs": "x", "{rng.choice(FIELDS)}": {nest}}}'
    return Attack("deep nesting", request(rng.choice(PATHS), text.encode()))


def wrong_encoding(rng: random.Random) -> Attack:
    text = json.dumps({**BODY, "inputs": "zażółć 🦆"}, ensure_ascii=False)
    headers = ""
    match rng.randrange(5):
        case 0:
            body = text.encode(rng.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig")))
        case 1:
            body = text.encode("cp1250", "replace")
        case 2:
            body = b'{"inputs": "\\ud800", "prompt": "\xed\xa0\x80", "messages": []}'
        case 3:
            body, headers = gzip.compress(text.encode()), "content-encoding: gzip\r\n"
        case _:
            body = text.encode()
            kinds = ("text/plain", "multipart/form-data; boundary=x", "application/json;" * 99, "")
            headers = f"content-type: {rng.choice(kinds)}\r\n"
    return Attack("wrong encoding", request(rng.choice(PATHS), body, headers=headers))


def large_body(rng: random.Random) -> Attack:
    size = 100_000_000
    path = rng.choice(PATHS)
    if rng.random() < 0.5:
        expect = rng.choice(("", "expect: 100-continue\r\n"))
        return Attack("100 MB", request(path, b"", headers=expect, length=size), filler=size)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    head += f"content-type: application/json\r\n\r\n{size:x}\r\n"
    return Attack("100 MB", head.encode(), filler=size)


def header_flood(rng: random.Random) -> Attack:
    match rng.randrange(3):
        case 0:
            headers = "".join(f"x-{i}: {i}\r\n" for i in range(rng.choice((10, 100, 5000))))
        case 1:
            headers = f"x-long: {'a' * rng.choice((1000, 20_000, 200_000))}\r\n"
        case _:
            names = ("x-request-id", "authorization", "x-request-timeout", "cookie", "origin")
            value = "".join(chr(rng.randrange(33, 256)) for _ in range(rng.randrange(300)))
            headers = f"{rng.choice(names)}: {value}\r\n"
    return Attack("header flood", request("/generate", json.dumps(BODY).encode(), headers=headers))


def pipelining(rng: random.Random) -> Attack:
    bodies = (
        json.dumps(BODY).encode(),
        b"{}",
        b"[]",
        json.dumps({**BODY, "stream": True}).encode(),
    )
    count = rng.randrange(2, 12)
    data = b"".join(request(rng.choice(PATHS), rng.choice(bodies)) for _ in range(count))
    leave = rng.choice(("", "", "close", "reset"))
    return Attack("pipelining", data, answers=count, leave=leave)


def half_request(rng: random.Random) -> Attack:
    whole = request(rng.choice(PATHS), json.dumps(BODY).encode())
    data = whole[: rng.randrange(1, len(whole))]
    return Attack("half requests", data, leave=rng.choice(("close", "reset")))


def leaving(rng: random.Random) -> Attack:
    body = json.dumps({**BODY, "stream": True, "parameters": {}, "max_tokens": None}).encode()
    data = request(rng.choice(PATHS), body)
    return Attack("leaving at once", data, leave=rng.choice(("close", "reset")))


def garbage(rng: random.Random) -> Attack:
    data = rng.choice(
        (
            rng.randbytes(rng.randrange(1, 3000)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(64),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(100),
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n" * 500,
        )
    )
    return Attack("garbage", data, answers=0)


def bad_framing(rng: random.Random) -> Attack:
    line = rng.choice(
        (
            "content-length: -1",
            "content-length: 99999999999999999999",
            "content-length: 5\r\ncontent-length: 6",
            "content-length: x",
            "transfer-encoding: chunked\r\ncontent-length: 3",
            "transfer-encoding: nonsense",
            "transfer-encoding: chunked\r\n\r\nzz\r\n",
            "transfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
            "bad header",
            ": empty",
            "host: y",
        )
    )
    data = f"POST {rng.choice(PATHS)} HTTP/1.1\r\nhost: x\r\n{line}\r\n\r\n0\r\n\r\n"
    return Attack("bad framing", data.encode(), answers=0)


def odd_targets(rng: random.Random) -> Attack:
    targets = (
        *("/%ff%fe", "/generate/", "//generate", "/../../etc/passwd", "/generate?" + "a=b&" * 500),
        *("/v1/models/" + "x" * 5000, "/v1/models/%00", "/v2/models/a%2fb/versions/%0a", "*", "/%"),
        *("http://other/generate", "/docs/../metrics", "/" + "a/" * 2000),
    )
    methods = (
        "GET",
        "POST",
        "PUT",
        "DELETE",
        "PATCH",
        "TRACE",
        "OPTIONS",
        "BREW",
        "get",
        "CONNECT",
    )
    data = request(rng.choice(targets), b"{}", method=rng.choice(methods))
    return Attack("odd targets", data)


Draw = Callable[[random.Random], Attack]
# (how often, what)
KINDS: tuple[tuple[int, Draw], ...] = (
    (20, broken_json),
    (25, wrong_types),
    (12, huge_numbers),
    (5, deep_nesting),
    (8, wrong_encoding),
    (1, large_body),
    (4, header_flood),
    (4, pipelining),
    (6, half_request),
    (4, leaving),
    (4, garbage),
    (4, bad_framing),
    (4, odd_targets),
)


def draw(seed: int, number: int) -> Attack:
    """Return attack `number` of a run; the same for the same seed."""
    rng = random.Random(f"{seed}/{number}")
    weights = [weight for weight, _ in KINDS]
    return rng.choices([make for _, make in KINDS], weights)[0](rng)
