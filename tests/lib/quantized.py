"""Tiny targets with quantised weights."""

import dataclasses

from specjax.models.bridge import make_model
from specjax.models.storage import quantize_params
from specjax.types import Target


def quantized(target, form, *patterns):
    """Return a target with the matrices of these module paths, by default all, rounded to a format."""
    formats = tuple((pattern, form) for pattern in patterns or ("*",))
    config = dataclasses.replace(target.model.config, quantized=formats)
    return Target(make_model(config), quantize_params(target.params, config))
