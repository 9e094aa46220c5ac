"""A small tekken.json, conversations, and the ids that mistral-common gives them.

`python tests/router/text/tekken_cases.py` writes `tekken_ids.json` beside it anew, where
mistral-common is installed with soundfile (the ids are those of 1.13.1): nothing else of the
project is imported here.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

IDS = Path(__file__).with_name("tekken_ids.json")
VERSIONS = ("v7", "v11", "v13")
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_21>", "<SPECIAL_22>", "<SPECIAL_23>"),
    *("[AUDIO]", "[BEGIN_AUDIO]", "<SPECIAL_26>", "<SPECIAL_27>", "<SPECIAL_28>", "<SPECIAL_29>"),
    *("<SPECIAL_30>", "<SPECIAL_31>", "[ARGS]", "[CALL_ID]", "[TRANSCRIBE]"),
)
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    "What is said here, and what is there to hear?",
    "  Ünïcode: 日本語, 한글, 🙂 \n\n\tthere 0123 ...",
    '{"name": "weather", "arguments": {"city": "Zürich"}}',
    "the theatre then therein HERE wheRe",
)
AUDIO = {"type": "audio"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the sky does over Zürich",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL: dict[str, Any] = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Zürich"}'},
}


def say(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    """Return a message of texts and sounds."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": role, "content": parts[0], **more}
    found = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": role, "content": found, **more}


# Messages, whether with a tool, and versions that take them.
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], bool, tuple[str, ...]], ...] = (
    ([say("user", TEXTS[0])], False, VERSIONS),
    ([say("user", AUDIO, "What is said here?")], False, VERSIONS),
    ([say("user", "Here: ", AUDIO, " and there: ", AUDIO)], False, VERSIONS),
    ([say("system", "Be brief."), say("user", AUDIO)], False, ("v13",)),
    (
        [
            *(say("system", "Be brief."), say("user", "What?")),
            *(say("assistant", "That. "), say("user", "And?")),
        ],
        *(False, VERSIONS),
    ),
    (
        [
            say("user", AUDIO, "What is the weather?"),
            {"role": "assistant", "tool_calls": [CALL]},
            say("tool", "It is raining.", tool_call_id="abcdefghi", name="weather"),
            *(say("assistant", "Rain."), say("user", "And tomorrow?")),
        ],
        *(True, VERSIONS),
    ),
)
LANGUAGES = (None, "en")  # of transcriptions
SECONDS = (0.5, 30.5)  # of the first sound in a conversation, and of others


def make_tekken(version: str) -> dict[str, Any]:
    """Return a tekken.json whose tokens are those of `TEXTS`."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [[bytes([byte]) for byte in word.encode()] for text in TEXTS for word in text.split()]
    while len(tokens) < 330:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if (word[i - 1], word[i]) == best and i < len(word):
                    word[i - 1 : i + 1] = [best[0] + best[1]]
        if best[0] + best[1] not in tokens:
            tokens.append(best[0] + best[1])
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + 40,
            "default_num_special_tokens": 40,
            "version": version,
        },
        "vocab": [
            {"rank": i, "token_bytes": b64encode(token).decode(), "token_str": None}
            for i, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)
        ],
        "audio": {
            "sampling_rate": 16000,
            "frame_rate": 12.5,
            "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }


def encode_all(version: str) -> dict[str, Any]:
    """Return what mistral-common makes of texts and conversations."""
    import tempfile

    import numpy as np
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.transcription.request import TranscriptionRequest
    from mistral_common.tokens.tokenizers.audio import Audio
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    def fill(message: dict[str, Any], sounds: Any) -> dict[str, Any]:
        if not isinstance(message.get("content"), list):
            return message
        parts = [
            {"type": "input_audio", "input_audio": next(sounds)} if part == AUDIO else part
            for part in message["content"]
        ]
        return {**message, "content": parts}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tekken.json")
        path.write_text(json.dumps(make_tekken(version)))
        whole = MistralTokenizer.from_file(str(path))
        plain = whole.instruct_tokenizer.tokenizer
        texts = [plain.encode(text, bos=False, eos=False) for text in TEXTS]
        prompts: list[list[int] | None] = []
        for messages, with_tool, versions in CONVERSATIONS:
            if version not in versions:
                prompts.append(None)
                continue
            sounds = iter(
                Audio(np.zeros(int(16000 * seconds), np.float32), 16000, "wav").to_base64("wav")
                for seconds in (SECONDS[0], *[SECONDS[1]] * 9)
            )
            request = ChatCompletionRequest(
                messages=[fill(message, sounds) for message in messages],
                tools=[TOOL] if with_tool else None,
            )
            prompts.append(whole.encode_chat_completion(request).tokens)
        heard = Audio(np.zeros(8000, np.float32), 16000, "wav").to_base64("wav")
        written = [
            whole.encode_transcription(
                TranscriptionRequest(audio=heard, language=language, model="x")
            ).tokens
            for language in LANGUAGES
        ]
    return {"texts": texts, "prompts": prompts, "transcriptions": written}


if __name__ == "__main__":
    IDS.write_text(json.dumps({version: encode_all(version) for version in VERSIONS}) + "\n")
