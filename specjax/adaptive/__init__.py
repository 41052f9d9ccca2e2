"""Adaptive depth: each token runs only the layers that a method selects.

A target with adaptive depth is lossy, but it can be the drafter of lossless decoding. `skip_layers(target, calm())`
returns a target with its own distribution. `drafters.thinned(target, calm())` uses the same model as a drafter, and the
full model verifies its drafts. Each file implements one method. Shared code is in
`specjax.models.skipping.policy`.
"""

from specjax.adaptive.calm import calibrated, calm
from specjax.adaptive.dynamax import Probes, dynamax, train_probes
from specjax.adaptive.ffn_skip import ffn_skip
from specjax.adaptive.first_routing import Routers, first, train_lora, train_routers
from specjax.adaptive.fitting import fit
from specjax.adaptive.layer_files import (
    read_corrections,
    read_probes,
    read_routers,
    save_corrections,
    save_probes,
    save_routers,
)
from specjax.adaptive.lora_drop import Corrections, blank_corrections, lora_drop, train_corrections
from specjax.adaptive.m2r2 import blank_m2r2, train_m2r2
from specjax.adaptive.matformer import matformer, nested_loss, train_nested
from specjax.adaptive.measure import Reading, read, share_run
from specjax.adaptive.s2d import s2d, sorted_loss, train_sorted
from specjax.adaptive.skip_decode import skip_decode
from specjax.adaptive.unified import unified
from specjax.models.skipping.policy import DepthPolicy
from specjax.models.variants.skipping_model import skip_layers

__all__ = [
    "Corrections",
    "DepthPolicy",
    "Probes",
    "Reading",
    "Routers",
    "blank_corrections",
    "blank_m2r2",
    "calibrated",
    "calm",
    "dynamax",
    "ffn_skip",
    "first",
    "fit",
    "lora_drop",
    "matformer",
    "nested_loss",
    "read",
    "read_corrections",
    "read_probes",
    "read_routers",
    "s2d",
    "save_corrections",
    "save_probes",
    "save_routers",
    "share_run",
    "skip_decode",
    "skip_layers",
    "sorted_loss",
    "train_corrections",
    "train_lora",
    "train_m2r2",
    "train_nested",
    "train_probes",
    "train_routers",
    "train_sorted",
    "unified",
]
