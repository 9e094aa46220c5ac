"""Train the byte-level BPE tokenizer of the embedded model and give it its chat template."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tools.demo.documents import (
    ASSISTANT,
    BEGIN,
    END,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    SYSTEM,
    USER,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Content is a string or a list of parts as in the OpenAI format; unknown roles count as the user.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] in ['system', 'developer'] %}{{- '" + SYSTEM + "' }}"
    "{%- elif message['role'] == 'assistant' %}{{- '" + ASSISTANT + "' }}"
    "{%- else %}{{- '" + USER + "' }}{%- endif %}"
    "{%- if message['content'] is string %}{{- message['content'] | trim }}"
    "{%- elif message['content'] %}"
    "{%- for part in message['content'] %}"
    "{%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}"
    "{%- endfor %}"
    "{%- endif %}"
    "{{- '" + END + "' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '" + ASSISTANT + "' }}{%- endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, context_length: int
) -> PreTrainedTokenizerFast:
    """Train on ``texts``; every byte is in the vocabulary, so any text survives a round trip.

    Plain text gets the begin token from the post-processor; the chat template prints its own.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A",
                pair=f"{BEGIN} $A {BEGIN} $B",
                special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
    )
