"""What is refused: every text, and the order in which problems are reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.router.validation_support import HELLO, TEN, TOKENIZER, P, validator
from tgi_trio.errors import ValidationError
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.text.tokenizer import TokenizerPool
from tgi_trio.router.validation import Validator


async def refusal(prompt: Any, parameters: P, **changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        await validator(**changes).validate(prompt, parameters)
    return str(caught.value)


OUT_OF_RANGE: list[tuple[P, str]] = [
    (P(best_of=2), "you must use sampling when `best_of` is > 1"),
    (P(temperature=0.0), "`temperature` must be strictly positive"),
    (P(temperature=-1.0), "`temperature` must be strictly positive"),
    (P(temperature=-1.0, accept_neutral=True), "`temperature` must be >= 0"),
    (
        P(temperature=1e39),
        "`temperature` must be >= 1.2e-38 and <= 3.4e+38, for float32 to hold what is computed "
        "with it. Given: 1e+39",
    ),
    (P(temperature=float("nan")), "`temperature` must be strictly positive"),
    (P(repetition_penalty=0.0), "`repetition_penalty` must be strictly positive"),
    (
        P(repetition_penalty=1e-21),
        "`repetition_penalty` must be >= 1e-20 and <= 1e+20, for float32 to hold what is computed "
        "with it. Given: 1e-21",
    ),
    (P(frequency_penalty=2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (P(frequency_penalty=-2.1), "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    (P(presence_penalty=2.1), "`presence_penalty` must be >= -2.0 and <= 2.0"),
    (P(top_p=1.0), "`top_p` must be > 0.0 and < 1.0"),
    (P(top_p=0.0), "`top_p` must be > 0.0 and < 1.0"),
    (P(top_p=1.5, accept_neutral=True), "`top_p` must be >= 0.0 and <= 1.0"),
    (P(top_p=-1e-9, accept_neutral=True), "`top_p` must be >= 0.0 and <= 1.0"),
    (P(typical_p=1.0), "`typical_p` must be > 0.0 and < 1.0"),
    (P(typical_p=0.0), "`typical_p` must be > 0.0 and < 1.0"),
    (P(typical_p=1.5, accept_neutral=True), "`typical_p` must be > 0.0 and <= 1.0"),
    (P(min_p=1.1), "`min_p` must be >= 0.0 and <= 1.0"),
    (P(top_k=0), "`top_k` must be strictly positive"),
    (P(top_k=-2, accept_neutral=True), "`top_k` must be > 0, or 0 or -1 for any token"),
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
        "`min_new_tokens` (OpenAI's API: `min_tokens`) must be >= 0 and <= `max_new_tokens` "
        "(`max_tokens`)",
    ),
    (P(no_repeat_size=-1), "`no_repeat_ngram_size` must be >= 0 and <= 106. Given: -1"),
    (P(no_repeat_size=107), "`no_repeat_ngram_size` must be >= 0 and <= 106. Given: 107"),
    *(
        (
            asked,
            "`no_repeat_ngram_window` and `no_repeat_ngram_whitelist` are for "
            "`no_repeat_ngram_size`, which is 0 or not given",
        )
        for asked in (P(no_repeat_window=9), P(no_repeat_spared=(1,)))
    ),
    *(
        (
            P(no_repeat_size=3, no_repeat_window=window),
            "`no_repeat_ngram_window` must be 0, for the whole text, or >= "
            f"`no_repeat_ngram_size` and < 2^31. Given: {window}",
        )
        for window in (2, 1 << 31)
    ),
    (
        P(no_repeat_size=3, no_repeat_spared=(1,) * 1025),
        "`no_repeat_ngram_whitelist` supports up to 1024 token ids. Given: 1025",
    ),
    (
        P(no_repeat_size=3, no_repeat_spared=(1, TOKENIZER.vocab_size)),
        "`no_repeat_ngram_whitelist` must hold token ids >= 0 and < "
        f"{TOKENIZER.vocab_size}. Given: {TOKENIZER.vocab_size}",
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
    assert (await check(HELLO, P(top_p=1.0, accept_neutral=True))).sampling.top_p == 1.0


@pytest.mark.trio
async def test_top_p_of_0_is_openais() -> None:
    """The likeliest token alone, by a number that float32 can tell from 0."""
    check = validator().validate
    for parameters in (
        P(top_p=0.0, accept_neutral=True),
        P(top_p=-0.0, accept_neutral=True),
        P(top_p=1e-300),
    ):
        sampling = (await check(HELLO, parameters)).sampling
        assert sampling.sample and 0.0 < np.float32(sampling.top_p) < 1e-30
    assert np.float32((await check(HELLO, P(typical_p=1e-300))).sampling.typical_p) > 0.0


@pytest.mark.trio
async def test_top_n_as_in_tgis_tests() -> None:
    for given_n, resolved in ((4, 4), (0, 0), (None, 0)):
        request = await validator().validate(HELLO, P(top_n_tokens=given_n))
        assert request.sampling.top_n == resolved
