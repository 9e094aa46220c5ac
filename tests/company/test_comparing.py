"""What counts as another answer."""

from __future__ import annotations

import json

import numpy as np

from tests.company.bodies import ClientCall
from tests.company.comparing import differences, resume
from tests.company.desk import Exchange, Visit
from tests.company.guests import Answer, Guest
from tests.company.telling import read_answer
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.request import Request, StoppingCriteria, Token


def test_where_sums_are_rounded_one_of_two_as_likely_may_be_chosen() -> None:
    """What follows is another text then; with a bit of difference they were not as likely."""
    ours = Answer([Token(5, "a", -1.5, False), Token(6, "b", -0.5, False)])
    alone = Answer([Token(7, "c", -1.5, False), Token(8, "d", -2.5, False)])
    assert differences(ours, alone, False, 0.0) and not differences(ours, alone, False, 1e-3)
    other = Answer([Token(7, "c", -1.5001, False)])
    assert differences(ours, other, False, 1e-3)


def test_where_sums_are_rounded_a_draw_may_take_the_token_beside() -> None:
    ours, alone = (Answer([Token(id, "a", logprob, False)]) for id, logprob in ((5, -9.0), (7, -2)))
    assert not differences(ours, alone, False, 1e-3, drawn=True)
    assert differences(ours, alone, False, 1e-3) and differences(ours, alone, False, 0, drawn=True)
    far = Answer([Token(50, "c", -2.0, False)])
    assert differences(ours, far, False, 1e-3, drawn=True)


def test_a_client_that_goes_on_has_a_part_of_its_answer() -> None:
    request = Request(np.array([3], np.int32), SamplingParameters(), StoppingCriteria(4))
    alone = Answer([Token(id, "a", -1.0, False) for id in (5, 6, 7, 8)])
    for part, emitted in ((0.0, ()), (0.2, ()), (0.5, (5, 6)), (0.99, (5, 6, 7))):
        assert resume(Guest(request, resumes=part), alone).request.emitted == emitted


def visit(*events: object) -> Visit:
    """Return a visit that has been told some events."""
    call = ClientCall("/v1/completions", {"stream": True})
    found = Visit(call)
    lines = [each if isinstance(each, str) else json.dumps(each) for each in events]
    pieces = [f"data: {line}\n\n".encode() for line in lines]
    found.exchanges.append(Exchange(call, 200, pieces=pieces))
    return found


def chunk(index: int, text: str, number: str = "x") -> dict[str, object]:
    return {"id": number, "choices": [{"index": index, "text": text}]}


def test_events_of_several_answers_come_in_any_order() -> None:
    one, two, three = (
        Answer(told=read_answer(visit(*events, "[DONE]")))
        for events in (
            (chunk(0, "a"), chunk(1, "b"), chunk(0, "c")),
            (chunk(1, "b", "other"), chunk(0, "a"), chunk(0, "c")),
            (chunk(1, "b"), chunk(0, "c"), chunk(0, "a")),
        )
    )
    assert not differences(one, two, False, 0.0)
    assert differences(one, three, False, 0.0) == [
        "answer (0, 0), event 0: {'choices': [{'index': 0, 'text': 'a'}]}, "
        "alone {'choices': [{'index': 0, 'text': 'c'}]}"
    ]


def test_who_has_left_has_been_told_a_beginning() -> None:
    whole = Answer(told=read_answer(visit(chunk(0, "a"), chunk(0, "c"), "[DONE]")))
    begun = Answer(told=read_answer(visit(chunk(0, "a"))))
    assert not differences(begun, whole, True, 0.0) and differences(begun, whole, False, 0.0)
    assert not differences(Answer(), whole, True, 0.0) and differences(Answer(), whole, False, 0.0)


def test_who_has_left_in_a_text_has_been_told_its_beginning() -> None:
    """However many tokens of it were in an event."""
    whole, begun, other = (
        Answer(told=read_answer(visit(*({"type": "delta", "delta": each} for each in texts))))
        for texts in (("ab", "c", "d"), ("a", "b"), ("a", "x"))
    )
    assert not differences(begun, whole, True, 0.0) and differences(begun, whole, False, 0.0)
    assert differences(other, whole, True, 0.0)


def test_who_has_timed_out_has_been_told_what_came_before() -> None:
    late = {"error": "the request's deadline has passed"}
    timed_out = Answer(told=read_answer(visit(chunk(0, "a"), late)))
    whole = Answer(told=read_answer(visit(chunk(0, "a"), chunk(0, "c"), "[DONE]")))
    assert timed_out.timed_out and not whole.timed_out
    assert not differences(timed_out.before_the_end(), whole, True, 0.0)
    assert differences(timed_out, whole, False, 0.0)
