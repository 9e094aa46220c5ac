"""Granite Speech behind a whole server: its adapter acts where a prompt has sounds, and only there.

The oracle is transformers' processor and model, with PEFT's adapter switched on and off as
transformers' `generate` does it by whether there are sounds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.router.media.image_files import noise
from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.media.granite_models import GraniteFolder, make_granite
from tests.system.client import get, post
from tests.system.server import ServerProcess, serving
from tests.system.test_videos import MOST, ask
from tests.system.test_videos import part as image_part
from tgi_trio.testing.checkpoints import VOCAB_SIZE

INSTRUCTION = "can you transcribe the speech into a written format?"  # of the model cards
# Of one length: transformers fills up those of a prompt to the longest.
FIRST, SECOND = make_samples(0.71), make_samples(0.71, seed=1)


def generate(
    made: GraniteFolder, *shown: Any, with_adapter: bool = True
) -> tuple[list[int], list[int]]:
    """Return ids and greedy tokens of a message of texts and samples.

    `with_adapter`: where there are samples.
    """
    sounds = [as_floats(each) for each in shown if not isinstance(each, str)]
    content = "".join(each if isinstance(each, str) else "<|audio|>" for each in shown)
    turns = [{"role": "user", "content": content}]
    text = made.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    given = {"audio": sounds} if sounds else {}
    inputs = made.processor(text=text, **given, add_special_tokens=False, return_tensors="pt")
    adapted = bool(sounds) and with_adapter
    with nullcontext() if adapted else made.adapted.disable_adapter():
        found = made.adapted.generate(
            **inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2
        )
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


def sent(*shown: Any) -> list[Any]:
    """Return the parts of a message of texts and samples."""
    return [each if isinstance(each, str) else audio_part(encode_sound(each)) for each in shown]


# Of Granite 4, without states and experts.
DENSE: dict[str, Any] = {
    **{"model_type": "granitemoehybrid", "layer_types": ["attention", "attention"]},
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96},
    "position_embedding_type": "rope",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "text", "asked"),
    [
        ("granite_speech", {}, ()),
        ("granite_speech", {}, ("--cpu-backend", "torch")),
        ("granite_speech", {}, ("--num-shard", "2")),
        ("granite_speech", DENSE, ()),
        ("granite_speech_plus", {}, ("--speculate", "2")),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_with_and_without_sounds(
    tmp_path: Path, family: str, text: dict[str, Any], asked: tuple[str, ...]
) -> None:
    """Also in one batch, and of a text whose prefix is cached with sounds and without."""
    made = make_granite(tmp_path, family, **text)
    shown: list[tuple[Any, ...]] = [
        (make_samples(1.9), " what is said?"),
        ("what is said?",),
        (SECOND, " and ", FIRST, " what is said, and by whom?"),
        ("what is said, and by whom?",),
    ]
    expected = [generate(made, *each) for each in shown]
    assert generate(made, *shown[0], with_adapter=False)[1] != expected[0][1]
    with serving("--model-id", str(tmp_path), "--dtype", "float32", *asked) as server:
        assert [ask(server, *sent(*each)) for each in shown] == expected
        with ThreadPoolExecutor(len(shown)) as pool:  # all in a batch
            assert list(pool.map(lambda each: ask(server, *sent(*each)), shown)) == expected
        assert expected[0][0].count(VOCAB_SIZE) == 21  # 96 frames are seven windows
        check_transcription(server, made)
        check_refusals(server)
        assert get(f"{server.url}/info").json()["adapters"] == []
        assert server.metric("tgi_adapters_loaded") == 1


def check_transcription(server: ServerProcess, made: GraniteFolder) -> None:
    """What is asked for is what the model cards ask for."""
    prompt, said = generate(made, FIRST, INSTRUCTION)
    expected = made.processor.tokenizer.decode(said, skip_special_tokens=True).strip()
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    answer = client.audio.transcriptions.create(
        model="tgi",
        file=("a.wav", encode_sound(FIRST)),
        extra_body={"max_completion_tokens": MOST},
    )
    assert (answer.text, answer.usage.input_tokens) == (expected, len(prompt))


def check_refusals(server: ServerProcess) -> None:
    for wrong, said in (
        (image_part(noise(8, 8)), "an image, and this model does not see images"),
        (audio_part(encode_sound(make_samples(0.016))), "it is too short for this model: 256"),
    ):
        body = {"messages": [{"role": "user", "content": [wrong]}], "max_tokens": 2}
        answer = post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 422 and said in answer.text, answer.text
