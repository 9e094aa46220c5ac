"""OpenAI's chat API with OpenAI's client: a streamed answer, then the same with a JSON schema.

python examples/chat_client.py [http://localhost:3000]
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:3000"

client = OpenAI(base_url=f"{URL}/v1", api_key="-")

stream = client.chat.completions.create(
    model="tgi",
    messages=[{"role": "user", "content": "What is continuous batching?"}],
    max_tokens=60,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
}
answer = client.chat.completions.create(
    model="tgi",
    messages=[{"role": "user", "content": "Name a city, as JSON."}],
    max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
)
print(answer.choices[0].message.content)
