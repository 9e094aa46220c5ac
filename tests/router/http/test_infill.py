"""llama.cpp's /infill: bodies as its editors send them, and the fields that they read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer
from tests.router.http.served import served
from tgi_trio.router.http.dialects.llama_cpp.replies import InfillEvent, InfillReply
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.request import LineLimits
from tgi_trio.router.validation import Validator

pytestmark = pytest.mark.trio

MARKS = (*GAP_MARKS, "<|repo_name|>")
ANSWER = "x + y\n    z"
ROOM = ServedLimits(max_input_tokens=480, max_total_tokens=512)

# What llama.vim asks for, and what it reads of the answer.
READ = [
    *("content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms"),
    *("timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms"),
    *("timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated"),
    "tokens_cached",
]
CHUNKS = [{"text": "a = 1\n", "time": [12, 34567], "filename": "one.py"}]
VIM = {
    "input_prefix": "def add(x, y):\n",
    "input_suffix": "\n\nprint(add(1, 2))\n",
    "input_extra": CHUNKS,
    "prompt": "    return ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": READ,
}
# What both send for what a user has just looked at, so that it is there when a gap is to be filled.
WARMING = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": CHUNKS,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
# llama.vscode's, without a choice of fields.
VSCODE = {name: VIM[name] for name in VIM if name not in ("response_fields", "stop")}
BEGINNING = "<|repo_name|>myproject\n<|file_sep|>one.py\na = 1\n<|file_sep|>filename\n"
WRITTEN = (
    BEGINNING + "<|fim_prefix|>def add(x, y):\n    return <|fim_suffix|>\n\nprint(add(1, 2))\n"
    "<|fim_middle|>"
)
PLAIN = {"input_prefix": "a", "input_suffix": "b"}


def engine(answer: str = ANSWER, limits: ServedLimits | None = None) -> FakeEngine:
    return FakeEngine(lambda _: answer, limits or ROOM, tokenizer=byte_tokenizer(MARKS))


def prompts(server: Any) -> list[str]:
    """Return the prompts that the engine has got, with special tokens."""
    decode = server.engine.tokenizer.decode
    return [decode(each.prompt_ids, skip_special=False) for each in server.engine.submitted]


async def ask(server: Any, body: dict[str, Any]) -> Any:
    client = await server.connect()
    return await client.post("/infill", body)


async def test_llama_vim_gets_what_it_reads(http):
    async with served(engine(), http) as server:
        server.engine.cached[0] = 20
        answer = await ask(server, VIM)
    assert answer.status == 200, answer.text
    assert prompts(server) == ["<s>" + WRITTEN]
    (request,) = server.engine.submitted
    added = server.engine.tokenizer.added_tokens
    assert set(request.sampling.gap_ends) == {added[mark] for mark in MARKS}
    assert request.stopping.stop_ids == set(request.sampling.gap_ends)
    assert request.stopping.lines == LineLimits(indent=4, seconds=1.0)
    assert request.stopping.max_new_tokens == 128
    # Samplers that are not named are off, the temperature too.
    sampling = request.sampling
    assert (sampling.sample, sampling.temperature, sampling.min_p) == (True, 1.0, 0.0)
    assert (sampling.top_k, sampling.top_p) == (40, 0.99)
    told = answer.json()
    assert list(told) == READ
    assert told["content"] == ANSWER and told["truncated"] is False
    count = len(request.prompt_ids)
    assert told["timings/prompt_n"] == count - 20
    assert told["timings/predicted_n"] == len(ANSWER) + 1  # and the end
    assert told["tokens_cached"] == count + len(ANSWER)
    assert all(isinstance(told[name], int | float) for name in READ if "/" in name)


async def test_llama_vscode_gets_everything(http):
    async with served(engine(), http) as server:
        answer = await ask(server, VSCODE)
    told = msgspec.json.decode(answer.body, type=InfillReply)
    assert told.content == ANSWER and told.prompt == WRITTEN and told.stop
    assert told.stop_type == "eos" and told.stopping_word == "" and told.has_new_line
    assert told.tokens == [] and told.tokens_predicted == len(ANSWER) + 1
    assert told.generation_settings["top_p"] == 0.99 and told.generation_settings["n_indent"] == 4
    assert told.timings.predicted_n == told.tokens_predicted


async def test_warming_computes_the_prompt_and_says_nothing(http):
    async with served(engine(), http) as server:
        answer = await ask(server, WARMING)
        whole = await ask(server, {**WARMING, "response_fields": None})
        stream = await ask(server, {**WARMING, "response_fields": None, "stream": True})
    assert answer.status == 200 and answer.json() == {}
    # All of it that a gap with the same files has, too, so that this much is there.
    opening = "<s>" + BEGINNING + "<|fim_prefix|>"
    assert all(each.startswith(opening) for each in prompts(server))
    assert ("<s>" + WRITTEN).startswith(opening)
    assert [each.stopping.max_new_tokens for each in server.engine.submitted] == [1, 1, 1]
    told = msgspec.json.decode(whole.body, type=InfillReply)
    assert (told.content, told.tokens_predicted, told.stop_type) == ("", 0, "limit")
    (last,) = events(stream.text)
    assert last["content"] == "" and last["stop"] is True and last["tokens_predicted"] == 0


def events(text: str) -> list[dict[str, Any]]:
    """Return the data of the events of a stream."""
    parts = text.removesuffix("\n\n").split("\n\n")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def test_a_stream_says_what_a_body_does(http):
    async with served(engine(), http) as server:
        stream = await ask(server, {**VSCODE, "stream": True, "n_indent": 0})
        body = await ask(server, {**VSCODE, "n_indent": 0})
    *tokens, last = events(stream.text)
    read = [msgspec.convert(each, InfillEvent) for each in tokens]
    assert "".join(each.content for each in read) + last["content"] == ANSWER
    assert [each.tokens_predicted for each in read] == [*range(1, len(ANSWER) + 2)]
    told, whole = msgspec.convert(last, InfillReply), body.json()
    for name in ("stop_type", "prompt", "tokens_predicted", "tokens_evaluated", "has_new_line"):
        assert getattr(told, name) == whole[name]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_that_leaves_the_block_ends_the_text(http, stream):
    async with served(engine("a\n    b\n  c\n    d"), http) as server:
        answer = await ask(server, {**VSCODE, "stream": stream})
    told = events(answer.text) if stream else [answer.json()]
    assert "".join(each["content"] for each in told) == "a\n    b\n"
    assert told[-1]["stop_type"] == "limit"
    assert server.engine.left == [] and not server.engine.live


@pytest.mark.parametrize(
    ("more", "kind", "word"),
    [
        ({"n_predict": 3}, "limit", ""),
        ({"stop": ["+"]}, "word", "+"),
        ({"stop": "y"}, "word", "y"),
        ({}, "eos", ""),
    ],
)
async def test_an_end_has_llama_cpps_name(http, more, kind, word):
    async with served(engine(), http) as server:
        answer = await ask(server, {**PLAIN, **more})
    told = answer.json()
    assert (told["stop_type"], told["stopping_word"]) == (kind, word)
    assert word not in told["content"] or not word


async def test_another_file_ends_it_as_the_model_s_end_does(http):
    async with served(engine("ab<|file_sep|>c"), http) as server:
        told = (await ask(server, PLAIN)).json()
    assert (told["content"], told["stop_type"]) == ("ab", "eos")


async def test_tokens_are_told_where_they_are_asked_for(http):
    async with served(engine("ab"), http) as server:
        told = (await ask(server, {**PLAIN, "return_tokens": True})).json()
    assert len(told["tokens"]) == 3


async def test_defaults_are_llama_cpps(http):
    async with served(engine(), http) as server:
        await ask(server, {**PLAIN, "seed": 7})
        await ask(server, {**PLAIN, "temperature": 0})
        await ask(server, {**PLAIN, "samplers": "kpt", "top_k": 3, "temperature": 0.5})
        await ask(server, {**PLAIN, "samplers": ["top_k", "infill", "temperature"], "n_indent": 0})
    first, greedy, short, judged = [each.sampling for each in server.engine.submitted]
    drawn = (first.sample, first.temperature, first.top_k, first.top_p, first.min_p, first.seed)
    assert drawn == (True, 0.8, 40, 0.95, 0.05, 7) and first.gap_ends == ()
    assert not greedy.sample
    assert (short.top_k, short.top_p, short.temperature, short.min_p) == (3, 0.95, 0.5, 0.0)
    assert judged.gap_ends and judged.temperature == 0.8
    assert all(each.stopping.lines is None for each in server.engine.submitted)
    assert server.engine.submitted[0].stopping.max_new_tokens > 300  # all that there is room for


async def test_prompts_are_kept_apart_where_none_is_to_be_kept(http):
    async with served(engine(), http) as server:
        for kept in (None, True, False, False):
            await ask(server, {**PLAIN, "cache_prompt": kept})
    first, second, third, last = [each.cache_salt for each in server.engine.submitted]
    assert (first, second) == ("", "") and third and last and third != last


LONG = "".join(f"line {i}\n" for i in range(100))


async def test_what_has_no_room_is_left_out_from_afar(http):
    """First other files, the farthest of them first; then what is far above, and far below."""
    files = [{"text": str(i) * 100, "filename": f"{i}.py"} for i in range(6)]
    near = {"input_prefix": "before\n", "input_suffix": "behind\n", "n_predict": 32}
    async with served(engine(), http) as server:
        some = await ask(server, {**near, "input_extra": files})
        none = await ask(server, {**near, "input_prefix": LONG, "input_extra": files})
        both = await ask(server, {"input_prefix": LONG, "input_suffix": LONG, "n_predict": 32})
        short = await ask(server, {"input_prefix": LONG, "input_suffix": "b", "n_predict": 32})
        flat = await ask(server, {"input_prefix": "x" * 999, "input_suffix": ""})
    for answer in (some, none, both, short, flat):
        assert answer.status == 200 and answer.json()["truncated"] is True
    first, second, third, fourth, fifth = prompts(server)
    assert "5.py\n" + "5" * 100 in first and "2.py" in first and "1.py" not in first
    assert "<|fim_prefix|>before\n<|fim_suffix|>behind\n" in first
    assert ".py" not in second and "line 99\n<|fim_suffix|>behind\n" in second
    before, _, behind = third.partition("<|fim_suffix|>")
    before, behind = before.partition("<|fim_prefix|>")[2], behind.removesuffix("<|fim_middle|>")
    assert LONG.endswith(before) and LONG.startswith(behind)
    assert before.startswith("line ") and behind.endswith("\n")  # cut between lines
    assert 2.5 < len(before) / len(behind) < 3.5
    # What one of them does not need, the other has.
    assert len(fourth) > 400 and fourth.endswith("line 99\n<|fim_suffix|>b<|fim_middle|>")
    assert 300 < fifth.count("x") < 480
    for request in server.engine.submitted[:4]:
        assert len(request.prompt_ids) <= 480 and request.stopping.max_new_tokens == 32


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"input_suffix": None}, "input_suffix", "Expected `str`, got `null`"),
        ({"input_prefix": ["a"]}, "input_prefix", "Expected `str`"),
        (
            {"input_extra": [{"filename": "a"}]},
            "input_extra[0].text",
            "missing required field `text`",
        ),
        ({"n_predict": -2}, "n_predict", "Expected `int` >= -1"),
        ({"samplers": ["top_k", "mirostat"]}, "samplers", "names `mirostat`, and has any of"),
        ({"samplers": ["infill", "top_k"]}, "samplers", "the last of the `samplers`"),
        ({"samplers": ["infill"]}, "top_k", "`top_k` comes before it"),
        ({"samplers": ["top_k", "infill"], "top_k": 1000}, "top_k", "<= 512. Given: 1000"),
        ({"top_p": 2}, "top_p", "`top_p` must be >= 0.0 and <= 1.0"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora", "choose a model by `model`"),
        ({"grammar": 'root ::= "a"'}, "grammar", "/v1/completions takes it, with `suffix`"),
        ({"model": "other"}, "model", "is not served here"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(more, param, text):
    async with served(engine()) as server:
        answer = await ask(server, {**PLAIN, **more})
    assert 400 <= answer.status < 500 and text in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == param
    assert server.engine.submitted == []


async def test_a_model_without_tokens_for_gaps_says_so():
    async with served(FakeEngine()) as server:
        answer = await ask(server, VIM)
    assert answer.status == 422 and "none of the tokens for infilling" in answer.text
    assert answer.json()["error"]["param"] == "input_suffix"


async def test_without_grammars_the_sampler_is_refused_by_the_flag():
    filling = engine()
    limits = ValidationLimits(480, 512, filling.tokenizer.vocab_size)
    filling.validator = Validator(filling.validator._pool, limits)
    async with served(filling) as server:
        refused = await ask(server, VIM)
        fine = await ask(server, {**VIM, "samplers": ["top_k", "top_p"]})
    assert refused.status == 422 and "--disable-grammar-support" in refused.text
    assert fine.status == 200


OTHERS = {"prompt": "ret ", "suffix": "\n}", "input_extra": [{"text": "a"}], "max_tokens": 9}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/fim/completions"])
async def test_other_files_may_be_given_to_other_routes(http, path):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post(path, OTHERS)
    assert answer.status == 200
    assert prompts(server) == [
        "<s><|repo_name|>myproject\n<|file_sep|>tmp\na<|file_sep|>filename\n"
        "<|fim_prefix|>ret <|fim_suffix|>\n}<|fim_middle|>"
    ]


async def test_other_files_without_a_gap_are_refused():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {**OTHERS, "suffix": None})
    assert answer.status == 422 and answer.json()["error"]["param"] == "input_extra"


LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")


async def test_a_model_whose_texts_are_not_joined_gets_ids(http):
    """CodeLlama: what stands behind the gap is read as a part of a text, and not by itself."""
    filling = FakeEngine(lambda _: "xy", ROOM, tokenizer=byte_tokenizer(LLAMA))
    async with served(filling, http) as server:
        client = await server.connect()
        files = [{"text": "z"}]
        infill = await ask(server, {**PLAIN, "input_extra": files})
        long = await ask(server, {"input_prefix": LONG, "input_suffix": "b", "n_predict": 9})
        whole = await client.post("/v1/completions", {"prompt": ["a", "c"], "suffix": "b"})
        mistral = await client.post("/v1/fim/completions", {"prompt": "a", "suffix": "b"})
    assert {infill.status, long.status, whole.status, mistral.status} == {200}
    written = prompts(server)
    assert written[0] == "<s>\n\n--- tmp ---\n\nz▁<PRE>a▁<SUF>b▁<MID>"
    assert infill.json()["prompt"] == written[0].removeprefix("<s>")
    assert long.json()["truncated"] and written[1].endswith("line 99\n▁<SUF>b▁<MID>")
    gap = "<s>▁<PRE>a▁<SUF>b▁<MID>"
    assert written[2:] == [gap, gap.replace("a", "c"), gap]
    assert whole.json()["usage"]["prompt_tokens"] == 2 * 6
    added = server.engine.tokenizer.added_tokens
    assert all(added["▁<EOT>"] in each.stopping.stop_ids for each in server.engine.submitted)


def count_marks(server: Any) -> list[dict[str, int]]:
    """Return how often each mark is a token of each prompt."""
    added = server.engine.tokenizer.added_tokens
    return [
        {mark: each.prompt_ids.tolist().count(added[mark]) for mark in MARKS}
        for each in server.engine.submitted
    ]


async def test_marks_in_a_users_files_are_text(http):
    """As at llama.cpp: a file that is about infilling is a file like any other."""
    everything = "".join(MARKS)
    files = [{"text": everything, "filename": "<|file_sep|>"}]
    body = {"input_prefix": everything, "input_suffix": everything, "prompt": everything}
    async with served(engine(), http) as server:
        first = await ask(server, {**body, "input_extra": files})
        plain = await ask(server, PLAIN)
        client = await server.connect()
        other = await client.post("/v1/completions", {**OTHERS, "input_extra": files})
        meant = {**OTHERS, "input_extra": files, "prompt": "<|fim_middle|>"}
        said = await client.post("/v1/completions", meant)
    assert {first.status, plain.status, other.status, said.status} == {200}
    own = {"<|file_sep|>": 2, "<|repo_name|>": 1}
    by_llama, alone, by_openai, by_hand = count_marks(server)
    once = dict.fromkeys(MARKS, 1)
    assert by_llama == once | own == by_openai
    assert alone == once
    assert by_hand == once | own | {"<|fim_middle|>": 2}
    assert first.json()["prompt"].count("<|fim_middle|>") == 5
    assert prompts(server)[0] == "<s>" + first.json()["prompt"]


async def test_what_has_no_room_is_counted_as_it_is_read(http):
    files = [{"text": "<|fim_middle|>" * 30, "filename": f"{n}.py"} for n in range(4)]
    body = {"input_prefix": "<|fim_prefix|>" * 4, "input_suffix": "b", "input_extra": files}
    async with served(engine(), http) as server:
        answer = await ask(server, {**body, "n_predict": 9})
    assert answer.status == 200 and answer.json()["truncated"]
    (marks,) = count_marks(server)
    assert marks["<|fim_middle|>"] == 1 == marks["<|fim_prefix|>"]
