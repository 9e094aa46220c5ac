"""Files of batches: which lines are requests, and what is kept of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.client.batch_files import (
    BatchRow,
    keep_answers,
    read_ids,
    read_rows,
    write_answer,
    write_failure,
)
from tgi_trio.client.http import Answer
from tgi_trio.errors import ConfigurationError

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def line(id: Any = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": BODY, **more}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "in.jsonl"
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return path


def test_requests_are_read_line_by_line(tmp_path: Path) -> None:
    path = written(tmp_path, line("a"), "", line("b", url="/v1/responses"))
    assert [(row.custom_id, row.url) for row in read_rows(path)] == [
        ("a", CHAT),
        ("b", "/v1/responses"),
    ]
    assert [json.loads(row.body) for row in read_rows(path)] == [BODY, BODY]
    assert read_ids(path) == {"a", "b"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([line(), "{"], "line 2 is no JSON"),
        ([5], "line 1 must have `custom_id`, `method`, `url` and `body`"),
        ([{"custom_id": "a"}], "line 1 must have `custom_id`"),
        ([line("")], "`custom_id` must be a text"),
        ([line(method="GET")], "`method` must be `POST`"),
        ([line(url="/generate")], "`url` must be one of `/v1/chat/completions`"),
        ([line(body=[])], "`body` must be an object"),
        ([line(body={"stream": True})], "`stream` and `background` are not for batches"),
        ([line(), line()], "has the `custom_id` 'a' twice"),
        ([""], "has no requests"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, lines: list[Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("{", r"\{")):
        read_ids(written(tmp_path, *lines))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_ids(tmp_path / "none")
    with pytest.raises(ConfigurationError, match="cannot be written: No such file"):
        keep_answers(tmp_path / "none" / "out")


def row(id: str) -> BatchRow:
    return BatchRow(id, CHAT, b"{}")


def test_what_has_an_answer_is_kept(tmp_path: Path) -> None:
    """Not what is worth another try, nor a line that was cut off."""
    path = tmp_path / "out.jsonl"
    assert keep_answers(path) == {} and path.read_bytes() == b""
    kept = [
        write_answer(row("well"), Answer(200, b'{"id":"x"}', "r1")),
        write_answer(row("refused"), Answer(422, b'{"error":{"message":"no"}}')),
    ]
    others = [
        write_answer(row("full"), Answer(429, b"{}")),
        write_answer(row("broken"), Answer(500, b"oh")),
        write_failure(row("lost"), "connection_error", "it ended"),
    ]
    path.write_bytes(kept[0] + b"".join(others) + kept[1] + others[0][:40])
    assert keep_answers(path) == {"well": 200, "refused": 422}
    assert path.read_bytes() == b"".join(kept)
    assert keep_answers(path) == {"well": 200, "refused": 422}
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    found = json.loads(kept[0])
    assert found["id"].startswith("batch_req_") and found["error"] is None
    assert found["response"] == {"status_code": 200, "request_id": "r1", "body": {"id": "x"}}
    lost = json.loads(others[2])
    assert lost["response"] is None
    assert lost["error"] == {"code": "connection_error", "message": "it ended"}
    assert json.loads(others[1])["response"]["body"] == {"error": {"message": "oh"}}


@pytest.mark.parametrize("text", ["notes\n", '{"custom_id": "a"}\n', "5\n"])
def test_another_file_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="holds something else"):
        keep_answers(path)
    assert path.read_text() == text
