"""Models of Tunix (google-tunix) as targets: their own modules with their own caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from own import of_page

from specjax import as_target, check_model, decode

pytest.importorskip("tunix", reason="google-tunix is not installed")
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3

VOCAB, LONGEST, HEADS, SIZE = 64, 128, 2, 8
SHAPES = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": HEADS, "head_dim": SIZE}
LLAMA = SHAPES | {"vocab_size": VOCAB, "norm_eps": 1e-6, "rope_theta": 10_000}
FLOAT = {"dtype": jnp.float32, "param_dtype": jnp.float32}
MODELS = {
    "qwen3": lambda rngs: qwen3.Qwen3(qwen3.ModelConfig(**LLAMA, **FLOAT), rngs=rngs),
    "qwen2": lambda rngs: qwen2.Qwen2(qwen2.ModelConfig(**LLAMA, use_tied_embedding=True), rngs=rngs),
    "llama3": lambda rngs: llama3.Llama3(llama3.ModelConfig(**LLAMA, weight_tying=True), rngs=rngs),
    "gemma3": lambda rngs: gemma3.Gemma3(
        gemma3.ModelConfig(**SHAPES, num_embed=VOCAB, sliding_window_size=5, param_dtype=jnp.float32), rngs=rngs
    ),
}


def made(name: str) -> nnx.Module:
    """Build a module with noise on all weights, because some weights start at 0."""
    definition, state = nnx.split(MODELS[name](nnx.Rngs(0)))
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return nnx.merge(definition, structure.unflatten(noisy))


def slots(batch: int, count: int):
    """Return the cache of Tunix's sampler."""
    new = lambda: jnp.zeros((batch, count, HEADS, SIZE))
    return {f"layer_{i}": {"k": new(), "v": new(), "end_index": jnp.zeros((batch,), jnp.int32)} for i in range(2)}


def whole(module: nnx.Module):
    """Run a pass over complete texts, as in training."""
    definition, _ = nnx.split(module)

    def run(params, tokens):
        batch, count = tokens.shape
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))
        positions = jnp.broadcast_to(jnp.arange(count), tokens.shape)
        model = nnx.merge(definition, nnx.State(params))
        return model(tokens, positions=positions, cache=None, attention_mask=mask)[0]

    return run


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama3"])
def test_all_promises_are_kept_with_its_own_cache(name):
    module = made(name)
    target = of_page("of_tunix")(module, module.config)
    actual = check_model(target.model, target.params, reference=whole(module))
    assert actual and len(actual.promises) == 13, actual
    for ours, theirs in zip(jax.tree.leaves(target.params), jax.tree.leaves(nnx.state(module)), strict=True):
        assert ours is theirs and ours.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()


@pytest.mark.parametrize("options", [{"cache": slots}, {}, {"trees": False}], ids=["cache", "trees", "chains"])
def test_windows_that_count_slots(options):
    """Gemma 3 in Tunix counts input indices, which is right for complete texts, so only for chains without a cache."""
    module = made("gemma3")
    target = as_target(module, max_positions=LONGEST, **options)
    actual = check_model(target.model, target.params, reference=whole(module))
    assert bool(actual) == ("trees" in options)
    assert actual or "Gemma3: a pass gives other logits than `reference`: their logits differ by " in str(actual)


class Numbers:
    """A tokenizer of texts such as "3 14 15"."""

    encode = staticmethod(lambda text: [int(word) for word in text.split()])
    decode = staticmethod(lambda ids: " ".join(str(int(i)) for i in ids))
    bos_id = pad_id = eos_id = staticmethod(lambda: 0)


def test_texts_are_those_of_its_own_sampler():
    module, prompts = made("qwen3"), [[5, 17, 5, 17], [9], [33, 2]]
    target = as_target(module, max_positions=LONGEST, cache=slots)
    actual = decode(target, None, prompts, key=0, max_new_tokens=24, eos=0)
    sampler = Sampler(module, Numbers(), CacheConfig(LONGEST, 2, HEADS, SIZE))
    theirs = sampler([Numbers.decode(row) for row in prompts], max_generation_steps=24, pad_output=False)
    ends = lambda ids: list(ids)[: list(ids).index(0)] if 0 in list(ids) else list(ids)
    assert [ends(row) for row in actual.to_lists()] == [ends(np.asarray(row)) for row in theirs.tokens]
