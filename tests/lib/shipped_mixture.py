"""The tiny trained mixture of experts in the form of GLM-4.5 with its own module, `tests/data/mixture`."""

from __future__ import annotations

import functools
from pathlib import Path

import specjax
from specjax.models.heads.contract import DraftHead
from specjax.models.loading.heads import load_head
from specjax.types import Target

FOLDER = Path(__file__).parents[1] / "data" / "mixture"


@functools.cache
def shipped_mixture() -> Target:
    return specjax.load(FOLDER)[0]


@functools.cache
def mixture_module() -> DraftHead:
    return load_head("native", shipped_mixture())
