from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.router.text.kinds import served, unhurried
from tgi_trio.errors import ValidationError
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, encode_prefill
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.text.tokenizer import TokenizerPool
from tgi_trio.router.validation import GenerateParameters, ValidationLimits, Validator, spread

P = GenerateParameters
TOKENIZER = served("byte_level")
HELLO = "ee"  # tokenised below: two letters are at most two tokens
TEN = [TOKENIZER.token_id(letter) or 0 for letter in "abcdefghij"]


def validator(**changes: Any) -> Validator:
    """The limits of TGI's own tests, with more room for new tokens."""
    limits = ValidationLimits(
        max_input_tokens=5,
        max_total_tokens=106,
        vocab_size=TOKENIZER.vocab_size,
        max_best_of=2,
        max_stop_sequences=3,
        max_top_n_tokens=4,
    )
    pool = TokenizerPool(TOKENIZER, workers=1)
    return Validator(pool, replace(limits, **changes), random.Random(7), check_grammar)


async def check_grammar(grammar: str) -> None:
    if grammar == "broken":
        raise ValidationError("grammar is not valid: what it is")


async def refusal(prompt: Any, parameters: P, **changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        await validator(**changes).validate(prompt, parameters)
    return str(caught.value)


OUT_OF_RANGE: list[tuple[P, str]] = [
    (P(best_of=2), "you must use sampling when `best_of` is > 1"),
    (P(temperature=0.0), "`temperature` must be strictly positive"),
    (P(temperature=-1.0), "`temperature` must be strictly positive"),
    (P(temperature=1e39), "`temperature` must be strictly positive"),
    (P(temperature=float("nan")), "`temperature` must be strictly positive"),
    (P(repetition_penalty=0.0), "`repetition_penalty` must be strictly positive"),
    (P(repetition_penalty=1e-50), "`repetition_penalty` must be strictly positive"),
    (P(frequency_penalty=2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (P(frequency_penalty=-2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (P(presence_penalty=2.1), "`presence_penalty` must be >= -2.0 and <= 2.0"),
    (P(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (P(top_p=0.0), "`top_p` must be > 0.0 and < 1.0"),
    (P(top_p=1.5, accept_top_p_one=True), "`top_p` must be > 0.0 and <= 1.0"),
    (P(typical_p=1.0), "`typical_p` must be > 0.0 and < 1.0"),
    (P(typical_p=0.0), "`typical_p` must be > 0.0 and < 1.0"),
    (P(min_p=1.1), "`min_p` must be >= 0.0 and <= 1.0"),
    (P(top_k=0), "`top_k` must be strictly positive"),
    (P(max_new_tokens=0), "`max_new_tokens` must be strictly positive"),
    (P(stop=("a", "b", "c", "d")), "`stop` supports up to 3 stop sequences. Given: 4"),
    (
        P(seed=1, best_of=2, do_sample=True),
        "`seed` must not be set when `best_of` > 1",
    ),
    (P(top_n_tokens=5), "`top_n_tokens` must be >= 0 and <= 4. Given: 5"),
    (P(seed=1 << 64), "`seed` must be >= 0 and < 2^64"),
    (P(seed=-1), "`seed` must be >= 0 and < 2^64"),
    (
        P(min_new_tokens=3, max_new_tokens=2),
        "`min_new_tokens` must be >= 0 and <= `max_new_tokens`",
    ),
    (
        P(logit_bias={TOKENIZER.vocab_size: 1.0}),
        f"`logit_bias` must name token ids >= 0 and < {TOKENIZER.vocab_size}. "
        f"Given: {TOKENIZER.vocab_size}",
    ),
    (
        P(logit_bias={3: 101.0}),
        "`logit_bias` must be >= -100.0 and <= 100.0. Given: 101.0 for 3",
    ),
    (P(adapter_id="x"), "`adapter_id` `x` is not served. Adapters served: none"),
]


@pytest.mark.trio
@pytest.mark.parametrize(("parameters", "message"), OUT_OF_RANGE)
async def test_every_text_about_a_parameter(parameters: P, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        validator().check(parameters)
    assert str(caught.value) == message
    assert await refusal(HELLO, parameters) == message


@pytest.mark.parametrize(
    ("parameters", "streaming", "most", "message"),
    [
        (P(best_of=0), True, 2, "`best_of` != 1 is not supported when streaming tokens"),
        (P(best_of=2), True, 2, "`best_of` != 1 is not supported when streaming tokens"),
        (
            P(decoder_input_details=True),
            True,
            2,
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
        (P(best_of=2), False, 1, "`best_of` != 1 is not allowed for this endpoint"),
        (P(best_of=3), False, 2, "`best_of` must be > 0 and <= 2. Given: 3"),
    ],
)
def test_every_text_about_an_endpoint(
    parameters: P, streaming: bool, most: int, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        validator(max_best_of=most).check_endpoint(parameters, streaming=streaming)
    assert str(caught.value) == message


def test_what_an_endpoint_accepts() -> None:
    for best_of in (None, 1):
        validator().check_endpoint(P(best_of=best_of), streaming=True)
    for best_of in (None, 0, 1, 2):
        validator().check_endpoint(P(best_of=best_of), streaming=False)
    validator().check_endpoint(P(decoder_input_details=True), streaming=False)


@pytest.mark.trio
async def test_every_text_about_the_prompt() -> None:
    assert await refusal("", P()) == "`inputs` cannot be empty"
    assert await refusal([], P()) == "`inputs` cannot be empty"
    for truncate in (0, 6):
        expected = f"`truncate` must be strictly positive and less than 5. Given: {truncate}"
        assert await refusal(HELLO, P(truncate=truncate)) == expected
    assert (await refusal("\ud800", P())).startswith("tokenizer error ")
    assert await refusal(TEN[:1], P(max_new_tokens=10), max_total_tokens=6) == (
        "`inputs` tokens + `max_new_tokens` must be <= 6. "
        "Given: 1 `inputs` tokens and 10 `max_new_tokens`"
    )
    assert await refusal(TEN, P(max_new_tokens=1)) == (
        "`inputs` must have less than 5 tokens. Given: 10"
    )
    assert await refusal(TEN[:2], P(grammar="broken")) == "grammar is not valid: what it is"
    limits = ValidationLimits(5, 106, TOKENIZER.vocab_size)
    without = Validator(TokenizerPool(TOKENIZER, workers=1), limits)
    with pytest.raises(ValidationError, match=r"^grammar is not supported$"):
        await without.validate(TEN[:2], P(grammar="{}"))


@pytest.mark.trio
async def test_length_texts_when_no_number_of_new_tokens_is_given() -> None:
    """What fits adapts to the prompt, so only a prompt over both limits fails the first check."""
    assert await refusal(TEN, P()) == "`inputs` must have less than 5 tokens. Given: 10"
    assert await refusal(TEN, P(), max_total_tokens=8) == (
        "`inputs` tokens + `max_new_tokens` must be <= 8. "
        "Given: 10 `inputs` tokens and 0 `max_new_tokens`"
    )
    full = await refusal(TEN, P(), max_total_tokens=10, max_input_tokens=10)
    assert full == "`inputs` must have less than 10 tokens. Given: 10"


@pytest.mark.trio
@pytest.mark.parametrize("ids", [[-1], [TOKENIZER.vocab_size], [1 << 40], ["a"], [None]])
async def test_ids_that_the_model_does_not_have(ids: list[Any]) -> None:
    expected = f"`inputs` must hold token ids >= 0 and < {TOKENIZER.vocab_size}"
    assert (await refusal(ids, P())).startswith(expected)


@pytest.mark.trio
async def test_a_tokenizer_with_more_tokens_than_the_model_does_not_reach_it() -> None:
    assert "token ids" in await refusal("<think>", P(), vocab_size=100)


def broken(*names: str) -> P:
    """Return parameters that are wrong in all of `names`."""
    wrong: dict[str, Any] = {
        "best_of": 2,
        "temperature": 0.0,
        "repetition_penalty": 0.0,
        "frequency_penalty": 3.0,
        "top_p": 2.0,
        "typical_p": 2.0,
        "top_k": 0,
        "max_new_tokens": 0,
        "stop": ("a",) * 9,
        "top_n_tokens": 9,
    }
    return P(**{name: wrong[name] for name in names})


ORDER = (
    "temperature",
    "repetition_penalty",
    "frequency_penalty",
    "top_p",
    "typical_p",
    "top_k",
    "max_new_tokens",
    "stop",
    "top_n_tokens",
)


@pytest.mark.parametrize("i", range(len(ORDER)))
def test_the_first_problem_in_tgis_order_is_reported(i: int) -> None:
    with pytest.raises(ValidationError, match=f"`{ORDER[i]}`"):
        validator().check(broken(*ORDER[i:]))


@pytest.mark.trio
async def test_the_total_is_checked_before_the_prompt() -> None:
    message = await refusal(TEN, P(max_new_tokens=100), max_total_tokens=106)
    assert message.startswith("`inputs` tokens + `max_new_tokens` must be <= 106.")


@pytest.mark.trio
async def test_top_p_as_in_tgis_tests() -> None:
    check = validator().validate
    assert (await check(HELLO, P(top_p=0.99, max_new_tokens=5))).sampling.top_p == 0.99
    assert (await check(HELLO, P(max_new_tokens=5))).sampling.top_p == 1.0
    assert (await check(HELLO, P(top_p=1.0, accept_top_p_one=True))).sampling.top_p == 1.0


@pytest.mark.trio
async def test_top_n_as_in_tgis_tests() -> None:
    for given_n, resolved in ((4, 4), (0, 0), (None, 0)):
        request = await validator().validate(HELLO, P(top_n_tokens=given_n))
        assert request.sampling.top_n == resolved


@pytest.mark.trio
async def test_defaults_are_the_off_values() -> None:
    request = await validator().validate("e", P(seed=11))
    assert request.sampling == SamplingParameters(seed=11)
    assert request.prompt_ids.dtype == np.int32
    assert request.stopping == StoppingCriteria(max_new_tokens=105)


@pytest.mark.trio
async def test_everything_given_arrives() -> None:
    parameters = P(
        temperature=0.5,
        repetition_penalty=1.25,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        top_k=7,
        top_p=0.5,
        typical_p=0.75,
        min_p=0.125,
        max_new_tokens=6,
        min_new_tokens=2,
        stop=("x", ""),
        watermark=True,
        seed=(1 << 64) - 1,
        top_n_tokens=3,
        decoder_input_details=True,
        grammar="{}",
        adapter_id="second",
        logit_bias={5: -1.5},
        ignore_eos=True,
        keep_stop=False,
        absolute_penalties=True,
    )
    request = await validator(adapters=("first", "second")).validate(
        TEN[:3], parameters, priority=2, deadline=4.5, cache_salt="salt", name="request-1"
    )
    assert request.prompt_ids.tolist() == TEN[:3]
    assert request.sampling == SamplingParameters(
        seed=(1 << 64) - 1,
        sample=True,
        temperature=0.5,
        top_k=7,
        top_p=0.5,
        typical_p=0.75,
        min_p=0.125,
        repetition_penalty=1.25,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        absolute_penalties=True,
        watermark=True,
        ignore_eos=False,  # a grammar says where a text ends
        top_n=3,
        prompt_logprobs=True,
        logit_bias=((5, -1.5),),
        grammar="{}",
        adapter=2,
    )
    assert request.stopping == StoppingCriteria(6, min_new_tokens=2, stop=("x",), keep_stop=False)
    assert (request.priority, request.deadline) == (2, 4.5)
    assert (request.cache_salt, request.name) == ("salt", "request-1")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("parameters", "sample"),
    [
        (P(), False),
        (P(do_sample=True), True),
        (P(temperature=1.0), False),
        (P(temperature=0.7), True),
        (P(top_k=5), True),
        (P(top_p=0.9), True),
        (P(top_p=1.0, accept_top_p_one=True), False),
        (P(typical_p=0.9), True),
        (P(min_p=0.1), True),
        (P(min_p=0.0), False),
        (P(repetition_penalty=1.2, frequency_penalty=1.0, presence_penalty=1.0), False),
        (P(do_sample=True, temperature=1e-30), False),  # too small to divide by: the likeliest
    ],
)
async def test_when_tokens_are_sampled(parameters: P, sample: bool) -> None:
    assert (await validator().validate(HELLO, parameters)).sampling.sample is sample


@pytest.mark.trio
async def test_max_new_tokens_is_honoured_exactly() -> None:
    check = validator(max_total_tokens=5000).validate
    assert (await check(TEN[:2], P(max_new_tokens=1500))).stopping.max_new_tokens == 1500
    assert (await check(TEN[:2], P())).stopping.max_new_tokens == 4998
    assert (await check(TEN[:2], P(max_new_tokens=4998))).stopping.max_new_tokens == 4998


@pytest.mark.trio
async def test_truncate_keeps_the_last_ids_and_comes_before_the_length_checks() -> None:
    request = await validator().validate(TEN, P(truncate=3))
    assert request.prompt_ids.tolist() == TEN[-3:]
    assert request.stopping.max_new_tokens == 103
    assert request.prompt_ids.base is None  # the long prompt is not kept alive


@pytest.mark.trio
async def test_special_tokens_are_added_to_prompts_and_not_to_chats() -> None:
    pool = TokenizerPool(served("sentencepiece"), workers=1)
    limits = ValidationLimits(64, 128, served("sentencepiece").vocab_size)
    checker = Validator(pool, limits)
    plain = await checker.validate("batch", P())
    chat = await checker.validate("batch", P(), add_special_tokens=False)
    assert plain.prompt_ids[1:].tolist() == chat.prompt_ids.tolist()


@pytest.mark.trio
async def test_seeds_come_from_the_source_given() -> None:
    first, second = validator(), validator()
    seeds = [(await first.validate(HELLO, P())).sampling.seed for _ in range(3)]
    again = [(await second.validate(HELLO, P())).sampling.seed for _ in range(3)]
    assert seeds == again
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 1 << 64 for seed in seeds)


@pytest.mark.trio
async def test_copies_differ_in_their_seeds_alone() -> None:
    request = await validator().validate(HELLO, P(seed=(1 << 64) - 1))
    copies = spread(request, 3)
    assert [copy.sampling.seed for copy in copies] == [(1 << 64) - 1, 0, 1]
    for copy in copies:
        assert replace(copy, sampling=request.sampling) == request


def valid(build: Callable[..., P]) -> st.SearchStrategy[P]:
    maybe = st.none()
    unit = st.floats(0, 1, exclude_min=True, exclude_max=True)
    return st.builds(
        build,
        temperature=maybe | st.floats(1e-37, 1e37),
        repetition_penalty=maybe | st.floats(1e-37, 1e37),
        frequency_penalty=maybe | st.floats(-2, 2),
        presence_penalty=maybe | st.floats(-2, 2),
        top_k=maybe | st.integers(1, 1 << 70),
        top_p=maybe | unit,
        typical_p=maybe | unit,
        min_p=maybe | unit,
        do_sample=st.booleans(),
        max_new_tokens=maybe | st.integers(1, 100),
        stop=st.lists(st.text(max_size=3), max_size=3).map(tuple),
        truncate=maybe | st.integers(1, 5),
        seed=maybe | st.integers(0, (1 << 64) - 1),
        top_n_tokens=maybe | st.integers(0, 4),
        logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    )


@unhurried
@given(parameters=valid(P), length=st.integers(1, 5))
def test_every_valid_request_keeps_the_limits_and_fits_the_wire(parameters: P, length: int) -> None:
    request: Request = trio.run(validator().validate, TEN[:length], parameters)
    ids, stopping = request.prompt_ids, request.stopping
    assert 1 <= len(ids) <= length
    assert len(ids) + stopping.max_new_tokens <= 106
    assert stopping.max_new_tokens == (parameters.max_new_tokens or 106 - len(ids))
    row = PrefillRow(
        sequence=1,
        token_ids=ids,
        prompt_length=len(ids),
        cached_length=0,
        block_ids=[1],
        max_new_tokens=stopping.max_new_tokens,
        min_new_tokens=stopping.min_new_tokens,
        sampling=request.sampling,
    )
    assert encode_prefill(1, [row])
