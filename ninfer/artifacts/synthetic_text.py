"""A tokenizer and a chat template for models whose weights are noise, so that they can be served like any other.

Ids 0-255 are bytes. The last two ids begin and end a message; the others are words that no text contains.
"""

from __future__ import annotations

import json

from ninfer.artifacts.artifact import TokenizerFiles

START, END = "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(vocab_size: int) -> TokenizerFiles:
    """vocab_size: at least 258."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    symbol = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}  # GPT-2's stand-ins
    named = {START: vocab_size - 2, END: vocab_size - 1}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **special} for t, i in named.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {symbol[b]: b for b in range(256)} | named,
            "merges": [],
            "ignore_merges": False,
        },
    }
    # written as text: some 250,000 words through a dict would take most of a second
    words = "".join(f'"<{i}>":{i},' for i in range(256, vocab_size - 2))
    text = json.dumps(tokenizer).replace('"vocab": {', '"vocab": {' + words, 1)
    return TokenizerFiles(text.encode(), b"", "the synthetic tokenizer")
