"""Logits for tests of sampling."""

import numpy as np


def logits_of(kind: str, rows: int, vocab: int) -> np.ndarray:
    """Return rows of one kind: normal, with many ties, flat, nearly one-hot (sharp), or with banned tokens."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, vocab)) * 3
    changed = {
        "normal": x, "ties": np.round(x), "flat": x * 1e-2, "sharp": x * 30,
        "banned": np.where(rng.random(x.shape) < 0.9, -np.inf, x),
    }  # fmt: skip
    return changed[kind].astype(np.float32)
