"""Tiny models of every family that `save_model` writes, and a tokenizer of words for them."""

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax import Target
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.gemma3 import Gemma3Config
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.models.rotary import RopeScaling

VOCAB = 96
SHAPES = dict(
    vocab_size=VOCAB, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_width=48, max_positions=128,
    name="tiny",
)  # fmt: skip
LLAMA3 = RopeScaling("llama3", 4.0, 1.0, 4.0, 16)
LONGROPE = RopeScaling(
    "longrope", 4.0, original_positions=10, amplitude=1.2, short=(1.0,) * 6, long=(1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
)
BEHIND = dict(norms="after", qk_norm=True, qk_norm_scope="projection")
YARN = RopeScaling("yarn", 4.0, 1.0, 2.0, 16, 1.1)

VARIANTS = {
    "llama": LlamaConfig(**SHAPES, rope_base=500.0, rope_scaling=LLAMA3),
    "llama-bfloat16": LlamaConfig(**SHAPES, tied=False, rope_scaling=YARN, dtype="bfloat16", stacked=True),
    "mistral": LlamaConfig(**SHAPES, window=5, rope_scaling=RopeScaling("linear", 3.0)),
    "qwen2": LlamaConfig(**SHAPES, qkv_bias=True, norm_eps=1e-6, stacked=True),
    "qwen3": LlamaConfig(**SHAPES, qk_norm=True, tied=False),
    "qwen2-some-windows": LlamaConfig(**SHAPES, qkv_bias=True, window=5, is_global=(True, False)),
    "ministral": LlamaConfig(**SHAPES, window=5, is_global=(False, True)),
    "phi3": LlamaConfig(**SHAPES | {"width": 64}, rotary_dim=12, rope_scaling=LONGROPE, window=7),
    "olmo2": LlamaConfig(**SHAPES, **BEHIND, rope_scaling=YARN),
    "olmo3": LlamaConfig(
        **SHAPES, **BEHIND, rope_base=500.0, rope_scaling=YARN, window=5, is_global=(False, True),
        local_rope_base=500.0, stacked=True,
    ),
    "gemma2": Gemma3Config(
        **SHAPES | {"width": 64}, is_global=(False, True), window=5, qk_norm=False, local_rope_base=None,
        query_scale=24**-0.5, attention_softcap=2.0, logit_softcap=3.0,
    ),
    "gemma3": Gemma3Config(**SHAPES, is_global=(False, True), window=5, query_scale=24**-0.5),
}  # fmt: skip


def drawn(config) -> Target:
    """Draw random parameters, all different, and large enough that every part matters."""
    shapes = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(0)
    size = lambda x: 0.3 + (x.shape[-1] ** -0.5 if x.ndim > 1 + config.stacked else 0.0)
    draw = lambda x: 1.0 * (x.ndim == 1 + config.stacked) + size(x) * rng.normal(size=x.shape)
    values = [jnp.asarray(draw(x), jnp.bfloat16).astype(x.dtype) for x in leaves]  # so that w - 1 is exact
    return Target(make_model(config), jax.tree.unflatten(tree, values))


def words() -> Tokenizer:
    vocab = ["<unk>", "a", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(LibraryCodec(backend), tuple(vocab), (2,), "{{ messages[0].content }}", {"eos_token": "</s>"})
