"""The language of `hop`: its words, the text of calls, returns and answers, and a tokenizer made for it.

The text on the wire is the ChatML and Hermes tool protocol that Qwen3 models speak. Invariants: every string here is
ASCII; the tokenizer's ids depend on this file alone, on every machine; constant protocol strings are single tokens, so
that a call costs 4 tokens and a model of half a million parameters can learn the protocol in a minute.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

WORDS = (
    "amber", "apple", "ash", "bay", "bear", "bell", "birch", "blue", "bolt", "brook", "cave", "cedar", "clay", "cliff",
    "cloud", "coal", "coin", "coral", "crab", "crow", "dawn", "deer", "dove", "drum", "elm", "fern", "fig", "fish",
    "fog", "fox", "frog", "gate", "gold", "hawk", "hill", "iron", "jade", "kite", "lake", "lamp", "leaf", "lily",
    "lion", "maple", "mint", "moon", "moss", "oak", "owl", "palm", "pearl", "pine", "plum", "rain", "raven", "ring",
    "rose", "ruby", "rust", "salt", "sand", "snow", "star", "storm",
)  # fmt: skip
"""64 words; a key or a value is two of them: ``amber-fox``."""

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (PAD, START, END, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CALL_OPEN = '<tool_call>\n{"name": "get", "arguments": {"key": "'
CALL_CLOSE = '"}}\n</tool_call>'
BROKEN_CLOSE = '"}\n</tool_call>'
BUSY, NO_KEY, NO_TOOL = '{"error": "busy"}', '{"error": "no key"}', '{"error": "no tool"}'
FUSED = (
    CALL_OPEN, CALL_CLOSE, BROKEN_CLOSE, f"{START}user\n", f"{START}assistant\n", "<tool_response>\n",
    "\n</tool_response>", '{"next": "', '{"value": "', BUSY, NO_KEY, '", "note": "', '"}', "answer ", "find ",
)  # fmt: skip

_ASSISTANT = f"{END}\n{START}assistant\n"
_CALL = re.compile(r"\s*<tool_call>\s*(\{.*\})\s*</tool_call>\s*", re.DOTALL)
_ANSWER = re.compile(r"\s*answer ([a-z]+-[a-z]+)\s*")


def prompt_text(key: str) -> str:
    """The prompt, up to where the policy's first turn begins."""
    return f"{START}user\nfind {key}{_ASSISTANT}"


def call_text(key: str) -> str:
    """A turn that looks ``key`` up, without its stop token."""
    return f"{CALL_OPEN}{key}{CALL_CLOSE}"


def answer_text(value: str) -> str:
    """A turn that answers, without its stop token."""
    return f"answer {value}"


def return_text(reply: str) -> str:
    """A tool's ``reply`` framed as it follows a turn that ended with its stop token."""
    return f"\n{START}user\n<tool_response>\n{reply}\n</tool_response>{_ASSISTANT}"


def found_text(field: str, key: str, note: str) -> str:
    """The reply of a lookup: ``{"next": "amber-fox", "note": "…"}``; ``field`` is ``next`` or ``value``."""
    return json.dumps({field: key, "note": note} if note else {field: key})


@dataclass(frozen=True, slots=True)
class Said:
    """What a turn's text says: ``call`` (of any tool), ``answer``, or neither (malformed)."""

    call: dict[str, Any] | None = None
    answer: str | None = None


def understand(text: str) -> Said:
    """Parse one turn's text (stop token cut off). Broken JSON or any other text is malformed, never an exception."""
    if match := _CALL.fullmatch(text):
        try:
            call = json.loads(match[1])
        except (ValueError, RecursionError):
            return Said()
        if isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
            return Said(call={"name": call["name"], "arguments": call["arguments"]})
        return Said()
    if match := _ANSWER.fullmatch(text):
        return Said(answer=match[1])
    return Said()


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer in Hugging Face's format: special tokens, 256 bytes, words, fused protocol strings.

    Every word is a vocabulary entry bare, after ``-`` and after a space (``ignore_merges``, as in Llama 3), so nothing
    is trained and the ids are the same everywhere; any other text falls back to bytes.
    """
    byte_level = {"add_prefix_space": False, "use_regex": False}
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(p + w for p in ("", "-", "Ġ") for w in WORDS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[ -]?[a-z]+|[^a-z]"), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in FUSED])
    return tokenizer
