from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from tests.router.text.kinds import (
    BACKENDS,
    byte_level,
    save,
    served,
    unhurried,
)
from tgi_trio import demo
from tgi_trio.errors import LibraryPanic, ModelLoadError, ValidationError
from tgi_trio.router.text.tokenizer import INLINE_CHARACTERS, Tokenizer, TokenizerPool
from tgi_trio.router.text.tokenizer_files import TokenizerConfig

LONG = "The server keeps a batch. " * 40

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def test_ids_are_int32_and_special_tokens_are_added_when_asked_for() -> None:
    tokenizer = served("sentencepiece")
    with_bos = tokenizer.encode_ids("batch", add_special_tokens=True)
    without = tokenizer.encode_ids("batch", add_special_tokens=False)
    assert with_bos.dtype == np.int32
    assert with_bos.tolist() == [tokenizer.token_id("<s>"), *without.tolist()]


@pytest.mark.parametrize("kind", BACKENDS)
@unhurried
@given(text=plain_text)
def test_short_and_long_ways_give_the_same_ids(kind: str, text: str) -> None:
    tokenizer = served(kind)
    text = text + "x" * (INLINE_CHARACTERS - len(text))  # the longest that is encoded in place
    assert tokenizer.encode_ids(text).tolist() == tokenizer.encode(text).ids.tolist()
    text += "y"
    assert tokenizer.encode_ids(text).tolist() == tokenizer.encode(text).ids.tolist()


@given(data=st.data())
@unhurried
def test_prompts_are_cut_from_the_left_or_only_counted(data: st.DataObject) -> None:
    tokenizer = served("sentencepiece")
    text = data.draw(plain_text)
    truncate, most = data.draw(st.none() | st.integers(1, 9)), data.draw(st.integers(1, 12))
    everything = tokenizer.encode_ids(text).tolist()
    expected = everything[-(truncate or len(everything)) :]
    ids, length = tokenizer.encode_prompt(text, True, truncate, most)
    assert length == len(expected)
    assert ids.dtype == np.int32
    assert ids.tolist() == (expected if length <= most else [])


@unhurried
@given(text=plain_text)
def test_byte_offsets_cut_the_same_text_as_character_offsets(text: str) -> None:
    encoding = served("sentencepiece").encode(text)
    data = text.encode()
    assert encoding.byte_offsets()[0] == (0, 0)  # the <s> that was added
    for (start, end), (first, last) in zip(encoding.offsets, encoding.byte_offsets(), strict=True):
        assert data[first:last].decode() == text[start:end]


def test_special_tokens_are_left_out_on_request() -> None:
    tokenizer = served("byte_level")
    ids = tokenizer.encode_ids("a<|user|>b</s>")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "a<|user|>b</s>"
    assert {tokenizer.token_id(token) for token in ("<s>", "</s>", "<|user|>")} == set(
        tokenizer.special_ids
    )


@pytest.mark.parametrize("kind", sorted(BACKENDS))
def test_many_ids_are_decoded_as_the_library_decodes_them(kind: str) -> None:
    tokenizer = served(kind)
    ids = tokenizer.encode_ids(LONG, add_special_tokens=False)
    assert len(ids) > INLINE_CHARACTERS
    expected = tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)
    assert tokenizer.decode(ids) == expected


@pytest.mark.trio
@pytest.mark.parametrize("count", [3, 4096, 10_001])
async def test_ids_are_copied_whatever_their_number(count: int) -> None:
    pool = TokenizerPool(served("sentencepiece"), 1)
    given = np.arange(count, dtype=np.int32)
    for ids in (given, given.tolist()):
        taken = await pool.take_ids(ids)
        assert taken.dtype == np.int32 and taken.tolist() == given.tolist()
        assert not np.shares_memory(taken, given)
    for wrong, error in ((2**31, OverflowError), ("x", ValueError)):
        with pytest.raises(error):
            await pool.take_ids([*given.tolist(), wrong])  # type: ignore[list-item]


def test_texts_of_single_tokens() -> None:
    sp, bpe = served("sentencepiece"), served("byte_level")
    byte = sp.token_id("<0xF0>") or 0
    assert (sp.token_text(byte), sp.token_bytes(byte)) == ("\ufffd", b"\xf0")
    lead = bpe.token_id("ð") or 0
    assert (bpe.token_text(lead), bpe.token_bytes(lead)) == ("\ufffd", b"\xf0")
    space = bpe.token_id("Ġ") or 0
    assert (bpe.token_text(space), bpe.token_bytes(space)) == (" ", b" ")
    assert served("wordpiece").token_bytes(served("wordpiece").token_id("a") or 0) == b"a"
    assert bpe.token_text(bpe.vocab_size + 1) == ""


def test_lone_surrogates_are_the_users_mistake() -> None:
    for text in ("\ud800", "\ud800" * 500):
        with pytest.raises(ValidationError, match=r"^tokenizer error "):
            served("byte_level").encode_ids(text)
        with pytest.raises(ValidationError, match=r"^tokenizer error "):
            served("byte_level").encode(text)


def test_a_panic_of_the_library_ends_nothing_but_the_call() -> None:
    backend = byte_level()
    backend.decoder = tokenizers.decoders.Strip("x", 0, 5)  # more than there is: a defect of theirs
    tokenizer = Tokenizer(backend, TokenizerConfig({}, (), {}))
    for count in (1, 2 * INLINE_CHARACTERS):
        with pytest.raises(LibraryPanic, match="out of bounds"):
            tokenizer.decode([tokenizer.token_id("x") or 0] * count)


def test_a_file_that_panics_at_its_first_text_is_refused_for_that(tmp_path: Path) -> None:
    """A token of its template that it lacks was said to be a matter of `ulimit -u`."""
    broken = json.loads((demo.model_path() / "tokenizer.json").read_text())
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    broken["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "nowhere", "type_id": 0}}, sequence],
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(broken))
    with pytest.raises(ModelLoadError, match=r"json cannot be used as a tokenizer: no entry found"):
        Tokenizer.from_file(file, TokenizerConfig({}, (), {}))


def test_threads_that_cannot_be_started_are_a_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class PanicException(BaseException):  # what the library raises, of a class without a module
        pass

    class Broken:
        @staticmethod
        def from_file(path: str) -> Broken:
            return Broken()

        def encode_batch_fast(self, texts: list[str]) -> None:
            raise PanicException("The global thread pool has not been initialized.")

    monkeypatch.setattr(tokenizers, "Tokenizer", Broken)
    with pytest.raises(ModelLoadError, match=r"cannot start its threads: .*ulimit -u"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", TokenizerConfig({}, (), {}))


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode_ids(LONG)) == LONG


MOST = 1 << 20  # tokens of a prompt


class _BlockedTokenizer(Tokenizer):
    """Tokenises when told to; counts how many texts are at it at the same time."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.entered = threading.Semaphore(0)
        self.running = self.most = 0
        self._lock = threading.Lock()

    def encode_prompt(
        self, text: str, add_special_tokens: bool, truncate: int | None, most: int
    ) -> Any:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self.entered.release()
        self.go.wait()
        with self._lock:
            self.running -= 1
        return np.zeros(1, dtype=np.int32), 1


@pytest.mark.trio
async def test_the_pool_gives_what_the_tokenizer_gives() -> None:
    tokenizer = served("byte_level")
    pool = TokenizerPool(tokenizer, workers=2)
    for text in ("short", LONG):
        ids, length = await pool.encode_prompt(text, True, 3, 3)
        assert (ids.tolist(), length) == (tokenizer.encode_ids(text).tolist()[-3:], 3)


@pytest.mark.trio
async def test_every_way_is_a_checkpoint() -> None:
    pool = TokenizerPool(served("byte_level"), workers=1)
    for text in ("short", LONG):
        with trio.testing.assert_checkpoints():
            await pool.encode_prompt(text, True, None, MOST)


@pytest.mark.trio
async def test_no_more_texts_at_a_time_than_workers() -> None:
    tokenizer = _BlockedTokenizer()
    pool = TokenizerPool(tokenizer, workers=2)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(pool.encode_prompt, LONG, True, None, MOST)
        for _ in range(2):
            await trio.to_thread.run_sync(tokenizer.entered.acquire)
        await trio.testing.wait_all_tasks_blocked()
        tokenizer.go.set()
    assert tokenizer.most == 2


@pytest.mark.trio
async def test_a_client_that_leaves_is_not_waited_for() -> None:
    """The thread still holds its place: leaving cannot be used to start more of them."""
    tokenizer = _BlockedTokenizer()
    pool = TokenizerPool(tokenizer, workers=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.encode_prompt, LONG, True, None, MOST)
        await trio.to_thread.run_sync(tokenizer.entered.acquire)
        nursery.cancel_scope.cancel()
    # The first thread is still at work here.
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.encode_prompt, LONG, True, None, MOST)
        await trio.testing.wait_all_tasks_blocked()
        assert tokenizer.running == 1
        tokenizer.go.set()
    assert tokenizer.most == 1
