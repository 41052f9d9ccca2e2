"""Models of jax-llm-examples as targets: their forward pass, weights and cache, and the function of docs/own_models.md.

The package is on no index. Put a copy into build/jax-llm-examples, or its path into SPECJAX_JAX_LLM_EXAMPLES:
`git clone https://github.com/jax-ml/jax-llm-examples build/jax-llm-examples`. Tested with commit 8b4b246.
"""

import dataclasses
import functools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from own import of_page
from tiers import exhaustive

from specjax import decode, drafters

COPY = pathlib.Path(
    os.environ.get("SPECJAX_JAX_LLM_EXAMPLES", pathlib.Path(__file__).parents[2] / "build/jax-llm-examples")
)
pytestmark = pytest.mark.skipif(not (COPY / "llama3").is_dir(), reason=f"no copy of jax-llm-examples in {COPY}")
PROMPTS, COUNT = [[5, 17, 5, 17], [9], [33, 2, 33]], 24
SHAPES = {
    "embed": 32, "q_heads": 4, "kv_heads": 2, "num_layers": 2, "head_dim": 16, "vocab_size": 64, "max_seq_len": 64,
    "causal": True, "dtype": jnp.float32, "quant_cache": False,
}  # fmt: skip
KERNELS = {"use_prefill_attn_kernel": False, "use_decode_attn_kernel": False}
DENSE = {"moe_ffw_size": -1, "moe_experts_per_tok": None, "moe_num_experts": None, "mlp_ffw_size": 64}
CONFIGS = {"llama3": {"ffw_size": 64, "quant_layer": False, **KERNELS}, "qwen3": {**DENSE, **KERNELS}}
NAMES = ["llama3", exhaustive("qwen3")]


@functools.cache
def built(name):
    """Return their module, random weights with clear argmax gaps, and the config of a tiny model on one device."""
    sys.path.insert(0, str(COPY / name))
    model = pytest.importorskip(
        f"{name}_jax.model", reason="flatbuffers or etils is not installed", exc_type=ImportError
    )
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3, devices=jax.devices()[:1])
    config = model.Config(**SHAPES, **CONFIGS[name], mesh=mesh)
    with jax.set_mesh(mesh):
        weights = model.Weights.init(jax.random.key(0), config)
    return model, dataclasses.replace(weights, lm_head=6 * weights.lm_head), config


def own_text(name, prompt):
    """Return the greedy text of their own `prefill` and `decode_step`."""
    model, weights, config = built(name)
    sizes = (1, config.max_seq_len) if name == "qwen3" else (1,)
    cache = model.KVCache.init(jax.random.key(0), config, *sizes)
    with jax.set_mesh(config.mesh):
        likeliest, _, cache = model.prefill(jnp.array([prompt]), weights, cache, config)
        token, text = likeliest[:, len(prompt) - 1 : len(prompt)], []
        for _ in range(COUNT):
            text.append(int(token[0, 0]))
            token, cache = model.decode_step(token, weights, cache, config)
    return text


@functools.cache
def target_of(name):
    return of_page("of_jax_llm_examples")(*built(name))


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_their_own_loop(name):
    decoded = functools.partial(decode, target_of(name), prompts=PROMPTS, key=0, max_new_tokens=COUNT)
    plain, ours = (decoded(drafter=x) for x in (drafters.autoregressive(), drafters.prompt_lookup(3, min_ngram=1)))
    assert ours.to_lists() == plain.to_lists() == [own_text(name, prompt) for prompt in PROMPTS]
    assert int(ours.stats.accepted.sum()) > 0 and int(ours.stats.target_passes.sum()) < len(PROMPTS) * COUNT
