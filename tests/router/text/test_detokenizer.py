# ruff: noqa: RUF001 - any script may come
from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.router.text.kinds import BACKENDS, CORPUS, NO_CONFIG, served, unhurried
from tgi_trio.router.text.detokenizer import PieceDetokenizer, WindowDetokenizer
from tgi_trio.router.text.tokenizer import Tokenizer

PROMPT = "Once upon a time"
kinds = pytest.mark.parametrize("kind", BACKENDS)

# Characters that some tokenizer spells in several tokens, and neighbours that might confuse them.
hard = st.sampled_from("aé日😀👩🏽‍ \n\u0301नमสวัס\ufffd▁Ġ#.'")
texts = st.text(st.one_of(hard, st.characters(exclude_categories=["Cs"])), max_size=40)


def pieces(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


def whole(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The oracle: what decoding the generation behind its prompt adds to the prompt's text."""
    before = tokenizer.decode(prompt, skip_special=False)
    after = tokenizer.decode([*prompt, *ids], skip_special=False)
    assert after.startswith(before)
    return after[len(before) :]


@kinds
def test_each_way_is_the_intended_one(kind: str) -> None:
    window = kind in ("wordpiece", "window_over_bytes")
    expected = WindowDetokenizer if window else PieceDetokenizer
    assert isinstance(served(kind).detokenizer([]), expected)


@kinds
@unhurried
@given(text=texts)
@example(text="\n".join(CORPUS))
@example(text="👩‍👩‍👧‍👦🇫🇷é")
def test_any_text_comes_out_whole(kind: str, text: str) -> None:
    tokenizer = served(kind)
    prompt = tokenizer.encode_ids(PROMPT).tolist()
    ids = tokenizer.encode_ids(text, add_special_tokens=False).tolist()
    assert "".join(pieces(tokenizer, prompt, ids)) == whole(tokenizer, prompt, ids)


@pytest.mark.parametrize("data", [b"\xed\xa1", b"\xed\xa1a", b"\xf0\x9f\x98", b"\xed", b"\xe2\x82"])
def test_bytes_that_end_within_a_character_are_replaced_as_in_a_whole_decode(data: bytes) -> None:
    """ED A1 begins a surrogate: the incremental decoder keeps it, a whole one replaces it twice."""
    tokenizer = served("byte_level")
    prompt = tokenizer.encode_ids(PROMPT).tolist()
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_bytes[bytes([byte])] for byte in data]
    assert "".join(pieces(tokenizer, prompt, ids)) == whole(tokenizer, prompt, ids)


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece", "unigram"])
@unhurried
@given(data=st.data())
def test_any_ids_come_out_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = served(kind)
    prompt = tokenizer.encode_ids(PROMPT).tolist()
    ordinary = st.integers(0, tokenizer.vocab_size - 1).filter(
        lambda token_id: token_id not in tokenizer.special_ids
    )
    ids = data.draw(st.lists(ordinary, max_size=30))
    assert "".join(pieces(tokenizer, prompt, ids)) == whole(tokenizer, prompt, ids)


@kinds
@unhurried
@given(text=texts)
def test_released_text_is_never_recalled_and_never_half_a_character(kind: str, text: str) -> None:
    tokenizer = served(kind)
    prompt = tokenizer.encode_ids(PROMPT).tolist()
    ids = tokenizer.encode_ids(text, add_special_tokens=False).tolist()
    expected, so_far = whole(tokenizer, prompt, ids), ""
    for piece in pieces(tokenizer, prompt, ids):
        so_far += piece
        assert expected.startswith(so_far)


def test_an_emoji_in_four_tokens_appears_with_the_last_of_them() -> None:
    tokenizer = served("sentencepiece")
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "😀".encode()]
    assert pieces(tokenizer, [5, 6], ids) == ["", "", "", "😀", ""]


@pytest.mark.parametrize(
    ("kind", "rest"), [("byte_level", "\ufffd"), ("sentencepiece", "\ufffd\ufffd\ufffd")]
)
def test_a_cut_character_becomes_replacements_at_the_end_or_before_other_text(
    kind: str, rest: str
) -> None:
    tokenizer = served(kind)
    if kind == "byte_level":
        ids = [tokenizer.token_id(token) or 0 for token in ("ð", "Ł", "ĺ")]
    else:
        ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "😀".encode()[:3]]
    letter = tokenizer.token_id("e") or 0
    assert "".join(pieces(tokenizer, [letter], ids)) == rest
    assert "".join(pieces(tokenizer, [letter], [*ids, letter])) == rest + "e"


def test_a_prompt_of_ids_may_end_inside_a_character() -> None:
    tokenizer = served("byte_level")
    ids = [tokenizer.token_id(token) or 0 for token in ("ð", "Ł", "ĺ", "Ģ")]
    assert tokenizer.decode(ids) == "😀"
    assert pieces(tokenizer, ids[:3], ids[3:]) == ["😀", ""]
    stray = tokenizer.token_id("Ģ") or 0  # a continuation that continues nothing
    assert pieces(tokenizer, [stray, *ids[:2]], ids[2:]) == ["", "😀", ""]


@kinds
def test_ids_beyond_the_vocabulary_have_no_text(kind: str) -> None:
    tokenizer = served(kind)
    prompt = tokenizer.encode_ids(PROMPT).tolist()
    first, last = tokenizer.encode_ids("server time", add_special_tokens=False)[[0, -1]].tolist()
    found = pieces(tokenizer, prompt, [first, tokenizer.vocab_size + 7, last])
    assert "".join(found) == "".join(pieces(tokenizer, prompt, [first, last]))


def test_invalid_bytes_do_not_hold_text_back_for_ever() -> None:
    """A window that waited for valid UTF-8 would grow with every token."""
    tokenizer = served("window_over_bytes")
    lead = tokenizer.token_id("ð") or 0
    detokenizer = tokenizer.detokenizer([lead])
    released = [detokenizer.push(lead) for _ in range(40)]
    assert sum(map(len, released)) >= 36


def test_a_replacement_character_in_the_vocabulary_is_text_like_any_other() -> None:
    tokenizer = served("byte_level")
    ids = tokenizer.encode_ids("a\ufffdb", add_special_tokens=False).tolist()
    assert "".join(pieces(tokenizer, [ids[0]], ids)) == "a\ufffdb"


def test_an_added_token_is_the_text_that_it_is_made_of() -> None:
    """The library makes `caf\ufffd` of it: `é` is half of another character in GPT-2's alphabet."""
    backend = BACKENDS["byte_level"]()
    backend.add_tokens([AddedToken("café"), AddedToken("\u0120x")])
    tokenizer = Tokenizer(backend, NO_CONFIG)
    text = "un café,\u0120x"
    ids = tokenizer.encode_ids(text, add_special_tokens=False).tolist()
    added = [id for id in ids if backend.id_to_token(id) in ("café", "\u0120x")]
    assert "".join(pieces(tokenizer, [], ids)) == text
    assert [tokenizer.token_bytes(id) for id in added] == ["café".encode(), "\u0120x".encode()]


def test_a_token_without_text_does_not_tear_a_character() -> None:
    tokenizer = served("byte_level")
    ids = [tokenizer.token_id(token) or 0 for token in ("ð", "Ł", "ĺ", "Ģ")]
    nothing = tokenizer.vocab_size + 1
    assert pieces(tokenizer, [], [ids[0], nothing, *ids[1:]]) == ["", "", "", "", "😀", ""]


@pytest.mark.parametrize("token", ["ð", "beyond the vocabulary"])
def test_the_window_stays_small_whatever_is_generated(token: str) -> None:
    tokenizer = served("window_over_bytes")
    token_id = tokenizer.token_id(token) or tokenizer.vocab_size + 1
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode, tokenizer.encode_ids(PROMPT).tolist())
    for _ in range(200):
        detokenizer.push(token_id)
    assert longest < 80
