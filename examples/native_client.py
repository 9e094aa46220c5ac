"""TGI's native API with huggingface_hub's client: tokens as they come, then all the details.

python examples/native_client.py [http://localhost:3000]
"""

from __future__ import annotations

import sys

from huggingface_hub import InferenceClient

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:3000"
PROMPT = "Continuous batching is"

client = InferenceClient(URL)
for token in client.text_generation(PROMPT, max_new_tokens=20, stream=True):
    print(token, end="", flush=True)
print()

answer = client.text_generation(PROMPT, max_new_tokens=20, details=True, seed=7, do_sample=True)
if answer.details is not None:
    print(answer.details.finish_reason, answer.details.generated_tokens, "tokens")
