"""What becomes of parameters that are valid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.router.text.kinds import served, unhurried
from tests.router.validation_support import HELLO, TEN, P, validator
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, encode_prefill
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.text.tokenizer import TokenizerPool
from tgi_trio.router.validation import Validator, fan_out


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
        logit_bias={5: -1.5},
        ignore_eos=True,
        keep_stop=False,
        absolute_penalties=True,
    )
    request = await validator().validate(
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
        (P(top_p=1.0, accept_neutral=True), False),
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
    copies = fan_out(request, 3)
    assert [copy.sampling.seed for copy in copies] == [(1 << 64) - 1, 0, 1]
    for copy in copies:
        same = replace(copy, sampling=request.sampling)
        assert all(
            getattr(same, field.name) is getattr(request, field.name) for field in fields(same)
        )


def valid(build: Callable[..., P]) -> st.SearchStrategy[P]:
    maybe = st.none()
    unit = st.floats(0, 1, exclude_min=True, exclude_max=True)
    return st.builds(
        build,
        temperature=maybe | st.floats(1e-20, 1e20),
        repetition_penalty=maybe | st.floats(1e-20, 1e20),
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
