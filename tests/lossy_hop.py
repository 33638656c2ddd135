"""hop over a tokenizer that forgets: it folds case and drops accents before it encodes, so text does not come back from
ids; and a player that says the same thing in other ids than the tokenizer would."""

from __future__ import annotations

import numpy as np
from tokenizers import normalizers

from libra.resources.types import Tokens
from libra.tasks.envs.hop import HopEnvironment
from libra.tasks.envs.hop_demo import sloppy
from libra.tasks.envs.hop_text import make_tokenizer


class LossyHop(HopEnvironment):
    """hop, but decode∘encode and encode∘decode are not identities."""

    @classmethod
    def make_tokenizer(cls) -> str:
        tokenizer = make_tokenizer()
        folds = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence(folds)
        return tokenizer.to_str(pretty=True)


def garbled(sequence: str, context: Tokens, stream: int) -> Tokens:
    """The sloppy player's turn with its last word spelled out in bytes."""
    tokenizer = make_tokenizer()
    turn = sloppy(sequence, context, stream).tolist()
    spelled = [i for i, id_ in enumerate(turn) if tokenizer.id_to_token(id_).lstrip("-").isalpha()]
    if not spelled:
        return np.array(turn, np.int32)
    place = spelled[-1]
    letters = [tokenizer.token_to_id(letter) for letter in tokenizer.id_to_token(turn[place])]
    return np.array([*turn[:place], *letters, *turn[place + 1 :]], np.int32)
