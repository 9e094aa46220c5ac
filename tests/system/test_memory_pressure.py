"""A KV cache ten times too small: clients see pauses and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.system.client import generate
from tests.system.server import ServerProcess, serving

CLIENTS = 40
NEW_TOKENS = 160
KV_TOKENS = 640  # 40 clients want about 40 * 200
LONG = range(1, CLIENTS, 4)  # clients whose answers have all their tokens


def parameters(n: int) -> dict[str, Any]:
    """Return what client `n` asks for: greedy, seeded, with a stop string, with a grammar.

    So hot that answers hardly end by themselves: short ones put no pressure on memory. Those of
    `LONG` never do.
    """
    common: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "details": True}
    digits = {"type": "regex", "value": "([0-9]{3}-){30}[0-9]{3}"}
    kinds: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": n, "temperature": 4.0, "min_new_tokens": NEW_TOKENS},
        {"do_sample": True, "seed": n, "temperature": 4.0, "stop": [" the", "\n\n"]},
        {"do_sample": True, "seed": n, "grammar": digits},
    ]
    return common | kinds[n % 4]


def answers(server: ServerProcess, clients: int = CLIENTS) -> list[tuple[str, str, list[int]]]:
    """Return text, finish reason and token ids of every client, all asking at once.

    The long ones first, before anything is computed: as many as are admitted to the small cache
    (6, with 5 of its 40 blocks each) go on in step, and none has the 11 blocks that it needs in
    the end while the others have nearly as many. So somebody has to give way.
    """

    def ask(n: int) -> tuple[str, str, list[int]]:
        body = generate(server.url, f"Client {n} asks: what is a ring?", **parameters(n))
        details = body["details"]
        ids = [token["id"] for token in details["tokens"]]
        return body["generated_text"], details["finish_reason"], ids

    before = server.metric("tgi_request_accepted")
    long = [n for n in LONG if n < clients]
    with ThreadPoolExecutor(CLIENTS) as pool:
        with server.held():
            found = {n: pool.submit(ask, n) for n in long}
            server.wait_metric("tgi_request_accepted", before + len(long))
            found |= {n: pool.submit(ask, n) for n in range(clients) if n not in LONG}
            server.wait_metric("tgi_request_accepted", before + clients)
        in_order = [found[n].result() for n in range(clients)]
    server.wait_idle()
    return in_order


def test_a_cache_ten_times_too_small_changes_no_token(demo: ServerProcess) -> None:
    """Seeds, stop strings and grammars go on where they were; so does the prefix cache's use."""
    expected = answers(demo)
    assert demo.metric("tgi_batch_preemptions") == 0
    assert {reason for _, reason, _ in expected} >= {"length", "eos_token"}
    small = ["--max-batch-total-tokens", str(KV_TOKENS), "--max-total-tokens", "512"]
    small += ["--max-batch-prefill-tokens", str(KV_TOKENS), "--max-input-tokens", "256"]
    small += ["--stall-timeout", "600"]
    with serving(*small) as server:
        assert answers(server) == expected
        assert server.metric("tgi_batch_preemptions") > 0
    with serving(*small, "--prefix-caching", "false") as server:
        assert answers(server, 12) == expected[:12]
        assert server.metric("tgi_prefix_cache_hit_tokens") == 0
