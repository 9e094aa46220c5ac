"""A whole tool round trip over OpenAI's chat API: the model calls, we answer, the model goes on.

python examples/tools_client.py [http://localhost:3000]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:3000"

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}

client = OpenAI(base_url=f"{URL}/v1", api_key="-")
messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
asked = client.chat.completions.create(
    model="tgi", messages=messages, tools=[WEATHER], tool_choice="required", max_tokens=80
)
(call, *_) = asked.choices[0].message.tool_calls or []
assert call.type == "function"
print("called:", call.function.name, json.loads(call.function.arguments))

messages += [
    asked.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "4 degrees, rain"},
]
answered = client.chat.completions.create(model="tgi", messages=messages, max_tokens=40)
print("answered:", answered.choices[0].message.content)
