"""A sharded denoiser writes the text of an unsharded one, each row that of the row alone, without large transfers."""

import functools
import re

import jax
import numpy as np
import pytest
from tiers import exhaustive
from toy import tiny_llama

import specjax
from specjax import Denoiser, UsageError, parallel
from specjax.diffusion import Procedure, methods
from specjax.diffusion.prepare import prepare
from specjax.engine.prepare import Settings
from specjax.engine.run import run

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]
VOCAB, MASK = 1024, 1023  # large beside everything else, so that a gathered row of logits is seen
CAUSAL = {"attention": "block_causal", "block": 4}
SEEDED = {**CAUSAL, "alignment": "shifted", "seeding": "seed_and_mask"}

# By name: how the model is read, the method on the mesh, and another with an exact memory that promises the same text.
WAYS = {
    "fused": (CAUSAL, lambda d: methods.sdar(d, tau=0.002), lambda d: methods.sdar(d, tau=0.002, fuse=False)),
    "whole": ({"alignment": "shifted"}, methods.freedave, lambda d: methods.freedave(d).replace(verify=None)),
    "dual": ({}, lambda d: methods.fast_dllm(d, memory="dual", tau=0.002), None),
    "seeded": (SEEDED, methods.fast_dllm_v2, None),
    "linear_spec": (SEEDED, methods.linear_spec, None),
    "s2d2": (CAUSAL, methods.s2d2, None),
}


@functools.cache
def denoiser(way: str, kv_heads: int = 8) -> Denoiser:
    """Return a denoiser with small weights. Confidences are near 1 / V, and a threshold of .002 decides several at
    once.
    """
    target = tiny_llama(num_heads=8, num_kv_heads=kv_heads, head_dim=64, vocab=VOCAB, stacked=True)
    return Denoiser(target.model, target.params, MASK, **WAYS[way][0])


@pytest.mark.parametrize(
    ("way", "data", "model", "temperature"),
    [
        ("fused", 2, 4, 0.9),
        exhaustive("fused", 1, 8, 0.0),
        exhaustive("whole", 1, 8, 0.0),
        exhaustive("whole", 2, 4, 0.9),
        exhaustive("dual", 2, 4, 0.0),
        exhaustive("linear_spec", 1, 8, 0.9),
        exhaustive("seeded", 4, 2, 0.9),
        exhaustive("s2d2", 2, 4, 0.9),
    ],
)
def test_a_row_on_eight_devices_is_the_row_alone_on_one(way, data, model, temperature):
    _, make, same = WAYS[way]
    full = denoiser(way)
    keys = jax.random.split(jax.random.key(3), len(PROMPTS))
    options = {"max_new_tokens": 10, "temperature": temperature}
    spread = specjax.denoise(_spread(full, data, model), make(full), PROMPTS, key=keys, **options)
    rows = [(same or make)(full)] * len(PROMPTS)
    alone = [
        specjax.denoise(full, procedure, [prompt], key=keys[i : i + 1], **options).to_lists()[0]
        for i, (procedure, prompt) in enumerate(zip(rows, PROMPTS, strict=True))
    ]
    assert spread.to_lists() == alone
    if way in ("fused", "dual"):
        assert float(spread.block_efficiency.max()) > 1, "some pass decides several columns"


def _spread(denoiser: Denoiser, data: int, model: int) -> Denoiser:
    return specjax.shard(denoiser, specjax.mesh(data, model))


def _gathered(sharded: Denoiser, procedure: Procedure) -> list[int]:
    """Count elements that are gathered, and those of the logits of all rows' windows."""
    settings = Settings(0.7)
    job = prepare(sharded, procedure, PROMPTS, settings, key=jax.random.key(0), max_new_tokens=8)
    text = run.lower(job).compile().as_text()
    assert "all-reduce" in text
    actual = re.findall(r"= (?:\()?(\w+)\[([\d,]*)\]\S* all-gather\(", text)
    return [int(np.prod([int(n) for n in dims.split(",") if n])) for _, dims in actual]


def test_neither_logits_nor_keys_are_gathered():
    sharded = _spread(denoiser("fused"), 1, 8)
    assert max(_gathered(sharded, methods.sdar(sharded)), default=0) < VOCAB


def test_a_denoiser_is_sharded_as_its_model_is_and_only_once():
    full = denoiser("fused")
    sharded = _spread(full, 1, 8)
    assert isinstance(sharded, Denoiser) and (sharded.mask_token, sharded.block) == (MASK, 4)
    head = sharded.params["head"]["weight"]
    assert head.addressable_shards[0].data.shape[0] == VOCAB // 8
    with pytest.raises(UsageError, match="llama is already sharded"):
        parallel.shard(sharded, specjax.mesh(1, 8))
