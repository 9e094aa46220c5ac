"""Fields of other servers that are not served: refused where they would change something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.dialects.responses.schema import ResponsesRequest
from tgi_trio.router.http.messages import schema, unserved
from tgi_trio.router.http.messages.body_reader import BodyReader
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}
TABLES = {
    "/v1/chat/completions": unserved.CHAT,
    "/v1/completions": unserved.COMPLETION,
    "/v1/responses": unserved.RESPONSES,
}
REFUSED = {path: 400 if path == "/v1/responses" else 422 for path in BODIES}
# Fields of requests in vLLM 0.33 and of SGLang in 2026; names of parts of the table are theirs.
OF_OTHERS = {
    "both": """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format
    seed stop stream stream_options temperature top_p thinking_token_budget user
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
    logprob_token_ids allowed_token_ids bad_words echo add_special_tokens structured_outputs
    priority request_id session_id return_tokens_as_token_ids return_token_ids
    return_weight_versions routed_experts_prompt_start return_token_offsets mm_payload
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval
    bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor custom_params
    data_parallel_rank disagg_prefill_dp_rank ebnf extra_key images_config json_schema lora_path
    ngram_corpus_id no_stop_trim regex return_cached_tokens_details return_hidden_states
    return_routed_experts rid routed_dp_rank routed_experts_start_len session_params stop_regex
    """,
    "/v1/chat/completions": """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    include_reasoning parallel_tool_calls add_generation_prompt continue_final_message
    documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    return_prompt_text
    input_ids max_dynamic_patch min_dynamic_patch return_meta_info return_prompt_token_ids
    separate_reasoning stream_reasoning task use_audio_in_video
    """,
    "/v1/completions": """
    prompt suffix prompt_embeds
    """,
    "/v1/responses": """
    background include input instructions max_output_tokens max_tool_calls metadata model
    logit_bias parallel_tool_calls previous_response_id prompt reasoning include_reasoning
    service_tier store stream temperature text tool_choice tools top_logprobs top_p top_k
    min_p truncation user skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key
    prompt_cache_options prompt_cache_retention safety_identifier watermarking request_id
    session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs
    cache_salt enable_response_messages previous_input_messages structured_outputs
    repetition_penalty seed stop stop_token_ids ignore_eos vllm_xargs kv_transfer_params
    ec_transfer_params chat_template_kwargs
    """,
}
DOCS = Path(__file__).parents[3] / "docs"
ODD = {"a": 1}  # no field means nothing by this


async def ask(path: str, **more: Any) -> tuple[int, str]:
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, {**BODIES[path], **more})
    return answer.status, answer.body.decode()


@pytest.mark.parametrize("path", BODIES)
async def test_each_field_of_the_table_is_refused_by_name_with_advice(path):
    async with served() as server:
        client = await server.connect()
        for name, row in TABLES[path].items():
            answer = await client.post(path, {**BODIES[path], name: ODD})
            text = answer.json()["error"]["message"]
            assert answer.status == REFUSED[path], name
            assert f"`{name}` is not supported: {row.advice}. Given: " in text
        assert server.engine.submitted == []


def idle(page: str, *rows: str) -> set[str]:
    """Return the fields that rows of a page name as those without effect."""
    lines = [
        line for line in (DOCS / page).read_text().splitlines() if any(r in line for r in rows)
    ]
    assert len(lines) == len(rows)
    return set(
        " ".join(line.split("|")[1] for line in lines).replace("`", "").replace(",", " ").split()
    )


@pytest.mark.parametrize("path", BODIES)
async def test_fields_of_other_servers_are_served_refused_or_documented_to_do_nothing(path):
    shape: Any = {
        "/v1/chat/completions": schema.ChatRequest,
        "/v1/completions": schema.CompletionRequest,
        "/v1/responses": ResponsesRequest,
    }[path]
    if path == "/v1/responses":
        sent = OF_OTHERS[path]
        without = idle("responses.md", "without effect: the answer says", "| ignored |")
    else:
        sent = OF_OTHERS["both"] + OF_OTHERS[path]
        without = idle("tgi-compat.md", "taken, without effect", "| taken; there is one way")
    known = {field.encode_name for field in msgspec.structs.fields(shape)} | shape.unserved.keys()
    assert set(sent.split()) - known <= without


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_change_nothing_are_taken(path):
    table = TABLES[path]
    async with served() as server:
        client = await server.connect()
        for turn in range(3):
            values = {n: (None, *row.neutral)[turn:][:1] for n, row in table.items()}
            fields = {name: value[0] for name, value in values.items() if value}
            answer = await client.post(path, {**BODIES[path], **fields})
            assert answer.status == 200, answer.body


@pytest.mark.parametrize("path", BODIES)
async def test_what_clients_send_without_a_meaning_here_is_taken(path):
    fields = {
        "nobody_knows_this": 1,
        "guided_decoding_backend": "outlines",
        "spaces_between_special_tokens": False,
        "cache_prompt": False,
        "user": "somebody",
        "length_penalty": 1.0,
        "mirostat_tau": 5.0,
    }
    assert (await ask(path, **fields))[0] == 200


@pytest.mark.parametrize("path", BODIES)
async def test_a_long_value_is_not_repeated_whole(path):
    status, text = await ask(path, samplers=["x" * 10_000])
    assert status == REFUSED[path] and len(text) < 500


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_nest_deeply_end_nothing(path):
    async with served() as server:
        client = await server.connect()
        body = b'{"lora":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
        answer = await client.post(path, body, content_type="application/json")
        assert answer.status in (400, 422)
        assert (await client.post(path, BODIES[path])).status == 200


async def test_no_field_can_be_served_and_refused_at_once():
    class Both(schema.CompletionRequest):
        mirostat: int | None = None

    with pytest.raises(ValueError, match="mirostat"):
        BodyReader(Both)


async def test_fields_the_sampler_knows_are_served_instead():
    fields = {"typical_p": 0.5, "min_p": 0.1, "top_k": 3, "repetition_penalty": 1.5}
    async with served() as server:
        client = await server.connect()
        for path, body in list(BODIES.items())[:2]:
            answer = await client.post(path, {**body, **fields, "stop_token_ids": [7]})
            assert answer.status == 200
            request = server.engine.submitted[-1]
            assert request.sampling.typical_p == 0.5
            assert request.stopping.stop_ids == {7}
            assert not request.stopping.keep_stop
            for name in ("include_stop_str_in_output", "no_stop_trim"):
                assert (await client.post(path, {**body, name: True})).status == 200
                assert server.engine.submitted[-1].stopping.keep_stop
            assert (await client.post(path, {**body, "typical_p": 1})).status == 200
            assert server.engine.submitted[-1].sampling.typical_p == 1.0


async def test_documents_reach_a_template_that_shows_them():
    template = "{% for each in documents or [] %}[{{ each.text }}]{% endfor %}"
    engine = FakeEngine(lambda prompt: "Hi")
    engine.chat_template = ChatTemplate({"default": template + "{{ messages[0].content }}"}, {})
    async with served(engine) as server:
        client = await server.connect()
        body = {**BODIES["/v1/chat/completions"], "documents": [{"text": "a"}, {"text": "b"}]}
        answer = await client.post("/chat_tokenize", body)
    assert answer.json()["templated_text"] == "[a][b]x"
