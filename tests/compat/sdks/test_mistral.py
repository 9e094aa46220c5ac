"""The `mistralai` package: gaps between two texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest
from openai import OpenAI

from tests.compat.agents.scripted import ANSWER, CONTEXT, FOUND, Family, make_model
from tests.system.server import ServerProcess, serving

package = pytest.importorskip("mistralai.client", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system

FILLING: Final = Family(
    name="filling",
    end="</s>",
    special=("</s>", "[PREFIX]", "[SUFFIX]"),
    marks=(),
    call=lambda thought, function, command: "",
    answer=lambda thought, text: text,
)
BEFORE, BEHIND = f"x = {FOUND}\n", "\nreturn x"


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("filling") / "model"
    fake = make_model(FILLING, folder, "", template="{{ messages }}")
    lengths = ("--max-input-tokens", str(CONTEXT - 1), "--max-total-tokens", str(CONTEXT))
    with serving("--model-id", str(folder), *lengths, fake=fake) as server:
        yield server


def test_a_gap_is_filled_and_streamed(filling: ServerProcess) -> None:
    with package.Mistral(api_key="-", server_url=filling.url) as client:
        answer = client.fim.complete(
            model="tgi", prompt=BEFORE, suffix=BEHIND, temperature=0, random_seed=1
        )
        (choice,) = answer.choices
        assert choice.message is not None and choice.message.content == ANSWER
        assert choice.finish_reason == "stop"
        with client.fim.stream(
            model="tgi", prompt=BEFORE, suffix=BEHIND, max_tokens=64, stop=["\n"]
        ) as events:
            chunks = [event.data for event in events]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(str(text) for text in texts) == ANSWER
    usage = chunks[-1].usage
    assert usage is not None and usage.total_tokens == answer.usage.total_tokens


def test_openais_suffix_is_the_same(filling: ServerProcess) -> None:
    with OpenAI(base_url=f"{filling.url}/v1", api_key="-") as client:
        answer = client.completions.create(model="tgi", prompt=BEFORE, suffix=BEHIND, max_tokens=64)
    assert answer.choices[0].text == ANSWER
