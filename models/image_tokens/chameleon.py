"""Chameleon: one decoder for texts and the codes of images, which are tokens of its vocabulary (arXiv 2405.09818).

Differences from Llama: queries and keys have a layer norm per head, and each head has a weight and a bias of its own.
The 34B model has its norms after the sublayers. Anole and Lumina-mGPT have the same form.

The model writes any token at any place. `processors.image_phases` and `processors.lumina_layout` keep codes and text
apart. Images in prompts are codes too; specjax does not contain the encoder that computes them from pixels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specjax.errors import UsageError
from specjax.files.untrusted import quote
from specjax.models.image_tokens.decoder import CodeDecoderConfig

CODE_NAME = re.compile(r"IMGIMG([A-J]+)[A-Z]")
"""The name of a code in the vocabulary: its digits as letters, A for 0, and one more letter."""


@dataclass(frozen=True)
class ChameleonConfig(CodeDecoderConfig):
    """Shapes and constants of a Chameleon model."""

    qk_layer_norm: bool = True
    name: str = "chameleon"


def code_tokens(vocabulary: Mapping[str, int]) -> np.ndarray:
    """Return the token int32[codes] of each code, by the names of the vocabulary.

    Args:
      vocabulary: ids by name, such as `vocabulary_map` of config.json.

    Raises: UsageError for a vocabulary without codes, or without some of them.
    """
    if not isinstance(vocabulary, Mapping):
        raise UsageError(f"a vocabulary has ids by name, not {quote(vocabulary)}; give vocabulary_map of config.json")
    names = ((CODE_NAME.fullmatch(name), token) for name, token in vocabulary.items())
    tokens = {int(match[1].translate(DIGITS)): token for match, token in names if match}
    if not tokens or sorted(tokens) != list(range(len(tokens))):
        raise UsageError(
            f"the vocabulary has {len(tokens)} codes, which must be numbered from 0 without a gap; give vocabulary_map "
            "of a Chameleon model"
        )
    return np.asarray([tokens[code] for code in range(len(tokens))], np.int32)


DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")
