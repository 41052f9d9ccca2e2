"""Features that families add to a decoder, over texts longer than a window and than the original context, and mutants.

loading/test_hf.py compares them with the code of their authors.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import those

from specjax import decode, drafters, load_head, save_head
from specjax.engine.prefill import CHUNK
from specjax.models import Gemma3Config, LlamaConfig, init_params, make_model
from specjax.models.heads import chimera, clover, eagle, eagle3, falcon, hamburger, hydra, kangaroo
from specjax.models.rotary import RopeScaling
from specjax.training import new_head
from specjax.types import Target

SHAPE = dict(
    vocab_size=48, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_width=48, max_positions=512,
    stacked=True,
)  # fmt: skip
LONGROPE = RopeScaling(
    "longrope", 4.0, original_positions=32, amplitude=1.3, short=(1.0, 1.1, 1.2), long=(1.5, 3.0, 6.0)
)
YARN = RopeScaling("yarn", 4.0, 1.0, 2.0, 16, 1.4)
CONFIGS = {
    "phi": LlamaConfig(**SHAPE, rotary_dim=6, rope_base=500.0, rope_scaling=LONGROPE, window=30),
    "olmo": LlamaConfig(
        **SHAPE, rope_base=500.0, rope_scaling=YARN, norms="after", qk_norm=True, qk_norm_scope="projection", window=9,
        is_global=(False, True), local_rope_base=500.0,
    ),
    "gemma2": Gemma3Config(
        **SHAPE, rope_base=500.0, local_rope_base=None, qk_norm=False, is_global=(False, True), window=9,
        query_scale=24**-0.5, attention_softcap=2.0, logit_softcap=3.0,
    ),
}  # fmt: skip
LENGTHS = CHUNK + 9, 5


@functools.cache
def target_of(config) -> Target:
    """Return a target with random weights, large enough that every part of it matters."""
    noise = np.random.default_rng(0)
    louder = lambda x: jnp.asarray(x + 0.2 * noise.normal(size=x.shape).astype(np.float32))
    return Target(make_model(config), jax.tree.map(louder, init_params(config, jax.random.key(0))))


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(1)
    long = np.resize(draw.integers(0, 48, 20), LENGTHS[0])
    return [long.tolist(), draw.integers(0, 48, LENGTHS[1]).tolist()]


@functools.partial(jax.jit, static_argnums=0)
def _whole(model, params, text):
    cache = model.init_cache(params, None, 1, text.shape[1])
    mask = jnp.tril(jnp.ones((1, *[text.shape[1]] * 2), bool))
    return model.forward(params, text, cache, positions=jnp.arange(text.shape[1])[None], mask=mask)[0].logits[0]


def whole(target: Target, text) -> np.ndarray:
    """Compute float32[T, V], the logits of a text in one pass, without a cache."""
    return np.asarray(_whole(target.model, target.params, jnp.asarray(text)[None]))


@pytest.mark.parametrize("name", those({"gemma2"}, CONFIGS))
def test_greedy_text_is_that_of_one_pass_whoever_drafts_and_beside_whom(name):
    """It covers chunks, steps, chains and trees; one prompt exceeds the original context and the other does not."""
    target, options = target_of(CONFIGS[name]), dict(key=0, max_new_tokens=20)
    plain = decode(target, drafters.autoregressive(), prompts(), **options).to_lists()
    for prompt, outputs in zip(prompts(), plain, strict=True):
        logits = whole(target, prompt + outputs)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == outputs
        top = np.sort(logits, -1)
        assert np.min(top[:, -1] - top[:, -2]) > 1e-4, "a near-tie proves nothing"
    for drafter in (drafters.prompt_lookup(5), drafters.token_recycling(48, num_nodes=12)):
        assert decode(target, drafter, prompts(), **options).to_lists() == plain
    assert decode(target, drafters.autoregressive(), prompts()[1:], **options).to_lists() == plain[1:]


@pytest.mark.parametrize("kind", [chimera, clover, eagle, eagle3, falcon, hamburger, hydra, kangaroo])
def test_layers_of_heads_are_those_that_files_describe(kind):
    """Other features of the target's layers are left out, because heads are read without them."""
    layer = kind.of_target(CONFIGS["olmo"]).layer
    actual = layer.norms, layer.qk_norm_scope, layer.is_global, layer.window, layer.stacked
    assert actual == ("before", "head", None, None, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["phi", "olmo"])
def test_a_head_begins_with_such_a_target_and_drafts_its_text(name, tmp_path):
    target, options = target_of(CONFIGS[name]), dict(key=0, max_new_tokens=12)
    head = new_head("eagle3", eagle3.of_target(CONFIGS[name]), target, jax.random.key(1))
    plain = decode(target, drafters.autoregressive(), prompts(), **options).to_lists()
    assert decode(target, head, prompts(), **options).to_lists() == plain
    save_head(tmp_path, head, target=target)
    actual = load_head(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, actual.params, head.params)


TEXT = np.random.default_rng(2).integers(0, 48, 40)
MUTANTS = {
    "all of a head rotated": ("phi", dict(rotary_dim=None, rope_scaling=LONGROPE._replace(long=(1.5, 3.0, 6.0, 6.0)))),
    "short factors": ("phi", dict(max_positions=32)),
    "no attention factor": ("phi", dict(rope_scaling=LONGROPE._replace(amplitude=1.0))),
    "one window for all": ("olmo", dict(is_global=None)),
    "windows in other layers": ("olmo", dict(is_global=(True, False))),
    "all layers stretched": ("olmo", dict(local_rope_base=None)),
    "no amplitude": ("olmo", dict(rope_scaling=YARN._replace(amplitude=1.0))),
    "norms left out": ("olmo", dict(qk_norm=False)),
    "no cap of scores": ("gemma2", dict(attention_softcap=None)),
    "no cap of logits": ("gemma2", dict(logit_softcap=None)),
    "scale by the head": ("gemma2", dict(query_scale=None)),
    "embedding as it is": ("gemma2", dict(scales_embedding=False)),
}


@pytest.mark.parametrize(
    "name", those({"short factors", "all layers stretched", "no cap of scores", "windows in other layers"}, MUTANTS)
)
def test_every_option_changes_the_logits(name):
    """This guards the tests above, and those of parity."""
    of, change = MUTANTS[name]
    config = dataclasses.replace(CONFIGS[of], **change)
    target = target_of(CONFIGS[of])
    params = target.params
    if not config.qk_norm and CONFIGS[of].qk_norm:
        attention = {k: v for k, v in params["layers"]["attention"].items() if not k.endswith("norm")}
        params = params | {"layers": params["layers"] | {"attention": attention}}
    actual = whole(Target(make_model(config), params), TEXT)
    assert np.max(np.abs(actual - whole(target, TEXT))) > 0.05


def test_the_longest_text_says_which_factors_hold():
    """longrope depends on the model, not on the text."""
    config = CONFIGS["phi"]

    def angles(limit):
        cos, sin = dataclasses.replace(config, max_positions=limit).attention_settings(jnp.ones((1, 1), int)).rotation
        return jnp.arctan2(sin, cos)[..., 3:]  # of the second half, where the sine has its own sign

    np.testing.assert_allclose(angles(32) * jnp.array(LONGROPE.short), angles(33) * jnp.array(LONGROPE.long), 1e-5)
