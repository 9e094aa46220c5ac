"""Run in the environment of the `text-generation` package: calls a server, prints what came back.

python text_generation_calls.py URL
"""

import asyncio
import json
import sys

from text_generation import AsyncClient, Client
from text_generation.errors import ValidationError

PROMPT = "Continuous batching is"
URL = sys.argv[1]


def plain(response):
    return json.loads(response.json())


def sync_calls():
    client = Client(URL, timeout=240)
    messages = [{"role": "user", "content": "What is a KV block?"}]
    try:
        client.generate(PROMPT, max_new_tokens=1_000_000)
        refusal = None
    except ValidationError as error:
        refusal = str(error)
    return {
        "whole": plain(
            client.generate(PROMPT, max_new_tokens=6, decoder_input_details=True, top_n_tokens=2)
        ),
        "best_of": plain(client.generate(PROMPT, max_new_tokens=3, best_of=2, do_sample=True)),
        "stopped": plain(client.generate(PROMPT, max_new_tokens=9, stop_sequences=[" "])),
        "events": [plain(each) for each in client.generate_stream(PROMPT, max_new_tokens=6)],
        "chat": plain(client.chat(messages, max_tokens=4)),
        # Not its streamed chats: it wants `tool_calls` in every chunk, which TGI never sent.
        "refusal": refusal,
    }


async def async_calls():
    client = AsyncClient(URL, timeout=240)
    whole = await client.generate(PROMPT, max_new_tokens=6)
    stream = client.generate_stream(PROMPT, max_new_tokens=6)
    return {"whole": plain(whole), "events": [plain(each) async for each in stream]}


print(json.dumps({"sync": sync_calls(), "async": asyncio.run(async_calls())}))
