"""Grammars in the shard: what the masks allow, faults that stay alone, replays, the cache."""

from __future__ import annotations

import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from threading import get_native_id as gettid
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.demo import model_path
from tgi_trio.errors import ModelLoadError
from tgi_trio.grammars.compiler import compile_grammar, load_tokenizer
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.text import grammars as texts
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.sampling.guides import STATE, Grammars

EOS = 0
VOCAB = json.loads((model_path() / "config.json").read_text())["vocab_size"]
TOKENIZER = load_tokenizer(model_path() / "tokenizer.json", [EOS], VOCAB)
PROMPT = [5, 6, 7]  # never counts: it matches no grammar here


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda *_: TOKENIZER)


def sequence(grammar: str, generated: list[int] | None = None, **sampling: Any) -> ShardSequence:
    ids = np.zeros(500, np.int32)
    known = [*PROMPT, *(generated or [])]
    ids[: len(known)] = known
    return ShardSequence(
        id=1,
        token_ids=ids,
        length=len(known),
        prompt_length=len(PROMPT),
        computed=0,
        block_ids=[],
        remaining=400,
        min_remaining=0,
        sampling=SamplingParameters(grammar=grammar, **sampling),
    )


def allowed(grammars: Grammars, one: ShardSequence) -> list[int]:
    masks, faults = grammars.allowed([one])
    assert not faults and masks.shape == (1, -(-VOCAB // 32) * 4)
    return tokens_of(masks[0])


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def append(one: ShardSequence, token: int) -> None:
    one.token_ids[one.length] = token
    one.length += 1


def wander(grammars: Grammars, one: ShardSequence, seed: int, most: int = 300) -> str:
    """Follow the masks at random until EOS is chosen; return the text."""
    choose = random.Random(seed)
    while EOS not in (tokens := allowed(grammars, one)):
        append(one, choose.choice(tokens))
        assert one.length < most, "no end"
    return TOKENIZER.decode_str(one.token_ids[len(PROMPT) : one.length].tolist())


@pytest.mark.parametrize("seed", range(8))
def test_any_way_through_a_regex_matches_it(grammars: Grammars, seed: int) -> None:
    pattern = r"[A-Z][a-z]{1,5}(-\d{2,4})?|x{3}"
    assert re.fullmatch(pattern, wander(grammars, sequence(texts.regex(pattern)), seed))


@pytest.mark.parametrize("seed", range(8))
def test_any_way_through_a_schema_is_valid_compact_json(grammars: Grammars, seed: int) -> None:
    schema: texts.Schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 4},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    text = wander(grammars, sequence(texts.json_schema(schema)), seed)
    value = json.loads(text)
    assert text == json.dumps(value, separators=(",", ":"))
    assert value["kind"] in ("cat", "dog") and value["legs"] in range(5)
    assert value.keys() <= {"kind", "legs", "tags"}
    assert len(value.get("tags", [])) <= 2


def test_eos_is_allowed_when_the_text_may_end_and_alone_when_it_must(grammars: Grammars) -> None:
    one = sequence(texts.regex("[0-9]{1,2}"))
    assert EOS not in allowed(grammars, one)
    append(one, TOKENIZER.tokenize_str("4")[0])
    assert {EOS} < set(allowed(grammars, one))
    append(one, TOKENIZER.tokenize_str("2")[0])
    assert allowed(grammars, one) == [EOS]


def test_a_replayed_sequence_goes_on_where_it_was(grammars: Grammars) -> None:
    text = texts.json_schema({"type": "array", "items": {"type": "string"}})
    one = sequence(text)
    for token in TOKENIZER.tokenize_str('["a","b'):
        assert token in allowed(grammars, one)
        append(one, token)
    replayed = sequence(text, one.token_ids[len(PROMPT) : one.length].tolist())
    assert allowed(grammars, replayed) == allowed(grammars, one)


def test_a_step_may_be_repeated_and_tokens_taken_back(grammars: Grammars) -> None:
    one = sequence(texts.choice(["yes", "no"]))
    before = allowed(grammars, one)
    append(one, TOKENIZER.tokenize_str("yes")[0])
    after = allowed(grammars, one)
    assert allowed(grammars, one) == after != before
    one.length -= 1
    assert allowed(grammars, one) == before


OBJECTS: texts.Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"a long name": {"enum": ["cat", "dog"]}, "n": {"type": "integer"}},
        "required": ["a long name", "n"],
        "additionalProperties": False,
    },
    "minItems": 2,
}


def test_tokens_of_a_bounded_text_may_be_taken_back(grammars: Grammars) -> None:
    """llguidance cannot take tokens back where it has counted some: drafts end in such texts."""
    text = texts.lark('start: body "</t>"\nbody[max_tokens=8]: /[^<]*/')
    one = sequence(text)
    words = TOKENIZER.tokenize_str("a draft that is wrong")
    for length in (2, 5, 3, 4, 1, 5):
        one.length = len(PROMPT) + length
        one.token_ids[len(PROMPT) : one.length] = words[:length]
        fresh = sequence(text, words[:length])
        assert allowed(grammars, one) == allowed(grammars, fresh), length


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_those_of_a_matcher_that_is_asked_every_time(
    grammars: Grammars, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where a grammar leaves one way for several tokens, most of them are not asked for."""
    compute, asked = Grammars._compute, 0

    def counted(own: Grammars, jobs: list[Any], masks: np.ndarray, widths: Any) -> None:
        nonlocal asked
        asked += len(jobs)
        compute(own, jobs, masks, widths)

    monkeypatch.setattr(Grammars, "_compute", counted)
    text, choose = texts.json_schema(OBJECTS), random.Random(seed)
    one, matcher, forced = sequence(text), compile_grammar(text, TOKENIZER), 0
    for _ in range(60):
        if one.length > len(PROMPT) and choose.random() < 0.2:  # a step that is taken back
            back = choose.randint(1, min(5, one.length - len(PROMPT)))
            one.length -= back
            matcher.rollback(back)
        tokens = allowed(grammars, one)
        assert tokens == tokens_of(np.frombuffer(matcher.compute_bitmask(), np.uint8))
        forced += len(tokens) == 1
        token = choose.choice(tokens)
        append(one, token)
        matcher.consume_token(token)
    assert forced > 10 and 60 - asked > forced // 2


def test_a_fault_stays_with_its_sequence(grammars: Grammars) -> None:
    good = sequence(texts.choice(["yes"]))
    broken = sequence(texts.lark("start: nothing_here"))
    strayed = sequence(texts.choice(["yes"]), TOKENIZER.tokenize_str("no"))
    later = sequence(texts.choice(["yes sir, with pleasure"]))
    for token in (allowed(grammars, later)[0], TOKENIZER.tokenize_str("no")[0]):  # a forced run
        append(later, token)
    masks, faults = grammars.allowed([broken, good, strayed, later])
    assert faults.keys() == {0, 2, 3}
    assert "nothing_here" in faults[0] and "grammar" in faults[2]
    assert tokens_of(masks[1]) == allowed(grammars, good)
    assert not masks[0].any() and not masks[2].any()


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def counted(text: str, tokenizer: object) -> LLMatcher:
        compiled.append(text)
        return compile_grammar(text, TOKENIZER)

    monkeypatch.setattr("tgi_trio.shard.sampling.guides.compile_grammar", counted)
    own = Grammars(lambda *_: TOKENIZER)
    first = texts.choice(["first"])
    for text in [first, first, *(texts.choice([str(i)]) for i in range(64)), first]:
        allowed(own, sequence(text))
    assert compiled.count(first) == 2
    assert len(compiled) == 66


def test_a_sequence_is_ready_when_its_grammar_is_compiled_well_or_not(
    grammars: Grammars,
) -> None:
    broken = sequence(texts.lark("start: nowhere"))
    grammars.prepare(broken)
    guide = broken.state[STATE]
    with pytest.raises(ValueError, match="nowhere"):
        guide.matcher(broken)  # type: ignore[attr-defined]
    assert grammars.prepare(broken)
    grammars.drop(broken)
    assert not broken.state


@pytest.mark.parametrize("niceness", [0, 12])
def test_grammars_are_compiled_wherever_a_core_is_idle(
    monkeypatch: pytest.MonkeyPatch, niceness: int
) -> None:
    """And give way to the steps, also where the whole server is to give way to others."""
    everywhere, seen = os.sched_getaffinity(0), []

    def noted(text: str, tokenizer: object) -> LLMatcher:
        seen.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, gettid())))
        return compile_grammar(text, TOKENIZER)

    def step() -> int:
        own = os.nice(niceness)  # Linux: of this thread, and of those that it starts
        grammars = Grammars(lambda *_: TOKENIZER)
        os.sched_setaffinity(0, {min(everywhere)})  # as the CPU kernels pin the thread that steps
        allowed(grammars, sequence(texts.choice(["yes"])))
        return own

    monkeypatch.setattr("tgi_trio.shard.sampling.guides.compile_grammar", noted)
    with ThreadPoolExecutor(1) as thread:
        own = thread.submit(step).result()
    assert [cores for cores, _ in seen] == [everywhere]
    assert seen[0][1] > own


def test_the_tokenizer_is_read_beside_the_steps_and_once() -> None:
    read: list[int] = []

    def load(*_: object) -> LLTokenizer:
        read.append(gettid())
        return TOKENIZER

    own = Grammars(load)
    assert not read
    own.start()
    own.start()
    allowed(own, sequence(texts.choice(["yes"])))
    assert len(read) == 1 and read[0] != gettid()
    other = Grammars(load)  # whose first grammar comes before anybody has said `start`
    allowed(other, sequence(texts.choice(["yes"])))
    assert len(read) == 2


def test_sequences_with_a_tokenizer_of_their_own_have_masks_of_their_own(tmp_path: Path) -> None:
    """One with more tokens than the model has, so that its masks are wider, and another end."""
    whole = json.loads((model_path() / "tokenizer.json").read_text())
    mark, more = 300, range(VOCAB, VOCAB + 40)
    whole["added_tokens"] += [
        {**whole["added_tokens"][0], "id": id, "content": f"<|own{id}|>"} for id in more
    ]
    file, loaded = tmp_path / "tokenizer.json", list[object]()
    file.write_text(json.dumps(whole))

    def load(name: str, ends: tuple[int, ...]) -> LLTokenizer:
        loaded.append((name, ends))
        return load_tokenizer(Path(name), [EOS, *ends], VOCAB) if name else TOKENIZER

    own, text = Grammars(load), texts.regex("yes")
    rows = [sequence(text), sequence(text, tokenizer=str(file), ends=(mark,)), sequence(text)]
    for length in range(4):
        masks, faults = own.allowed(rows)
        assert not faults
        plain, other, again = map(tokens_of, masks)
        assert plain == again
        assert other == (sorted([*plain, mark]) if EOS in plain else plain), length
        if EOS in plain:
            break
        for row in rows:
            append(row, plain[0])
    assert EOS in plain and loaded == [("", ()), (str(file), (mark,))]


def test_a_tokenizer_that_is_gone_ends_its_own_sequences_alone(tmp_path: Path) -> None:
    def load(name: str, ends: tuple[int, ...]) -> LLTokenizer:
        return load_tokenizer(Path(name), [EOS], VOCAB) if name else TOKENIZER

    own, text = Grammars(load), texts.choice(["yes"])
    masks, faults = own.allowed([sequence(text, tokenizer=str(tmp_path / "none")), sequence(text)])
    assert list(faults) == [0] and "none cannot be used for grammars" in faults[0]
    assert tokens_of(masks[1]) and not tokens_of(masks[0])


def test_tokenizers_of_adapters_are_dropped_when_there_are_too_many() -> None:
    loaded: list[str] = []

    def load(name: str, ends: tuple[int, ...]) -> LLTokenizer:
        loaded.append(name)
        return TOKENIZER

    own, text = Grammars(load), texts.choice(["yes"])
    own.start()
    names = [str(i) for i in range(12)]
    for name in (*names, names[-1], names[0], ""):
        allowed(own, sequence(text, tokenizer=name))
    assert loaded == ["", *names, names[0]]


def test_where_the_tokenizer_cannot_be_used_sequences_with_a_grammar_fail_alone(
    tmp_path: Path,
) -> None:
    own = Grammars(lambda *_: load_tokenizer(tmp_path / "none"))
    first, second = (sequence(texts.choice([word])) for word in ("yes", "no"))
    while not own.prepare(first):
        time.sleep(0.001)
    masks, faults = own.allowed([first, second])
    assert len(masks) == 2 and faults.keys() == {0, 1}
    assert all("cannot be used for grammars" in fault for fault in faults.values())


def test_a_tokenizer_that_is_there_again_is_loaded_for_the_next_sequence(tmp_path: Path) -> None:
    file, text = tmp_path / "tokenizer.json", texts.choice(["yes"])

    def load(*_: object) -> LLTokenizer:
        if not file.exists():
            raise ModelLoadError("the file is missing")
        return TOKENIZER

    own = Grammars(load)
    own.start()
    early = sequence(text)
    while not own.prepare(early):
        time.sleep(0.001)
    assert own.allowed([early])[1] == {0: "the file is missing"}
    file.touch()
    late = sequence(text)
    while not own.prepare(late):
        time.sleep(0.001)
    masks, faults = own.allowed([late])
    assert masks.any() and not faults


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    with pytest.raises(ModelLoadError, match="cannot be used for grammars"):
        load_tokenizer(file)
    file.write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be used for grammars"):
        load_tokenizer(file, [EOS], VOCAB)


def test_a_gap_waits_for_the_texts_of_tokens_and_has_them_as_bytes() -> None:
    """Special tokens have none, as they are never a part of what is filled in."""
    reading = Event()

    def load(*_: object) -> LLTokenizer:
        reading.wait(timeout=60)
        return TOKENIZER

    own = Grammars(load)
    one = sequence("")
    one.sampling = SamplingParameters(gap_ends=(EOS,))
    assert not own.prepare(one)
    reading.set()
    ids = TOKENIZER.tokenize_str("return x")
    assert b"".join(own.pieces(np.array(ids, np.int64))) == b"return x"
    assert own.prepare(one)
    assert own.pieces(np.array([EOS], np.int64)) == [b""]


def test_a_gap_fails_where_the_tokenizer_cannot_be_read() -> None:
    def load(*_: object) -> LLTokenizer:
        raise ModelLoadError("tokenizer.json is damaged")

    own = Grammars(load)
    with pytest.raises(ValueError, match="damaged"):
        own.pieces(np.zeros(0, np.int64))
