"""The row of GEAR, the memory of its cache, and the models that it does not support."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrids import tiny_hybrid
from toy import markov, tiny_llama

import specjax
from specjax import UsageError, compression
from specjax.catalog import METHODS
from specjax.catalog.schemes import compressed_form, of_drafts
from specjax.compression import gear
from specjax.drafters import prompt_lookup
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run
from specjax.models import make_model
from specjax.models.cache import SLOTS
from specjax.numerics.text_identity import explain_rounding
from specjax.trees import parse


def test_options_and_defaults_are_those_of_the_function():
    row = METHODS["gear"]
    for function in (row.make, row.load_check()):
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert {option.name: option.default for option in row.options} == defaults
    assert row.guarantee == "lossy" and row.kind == "cache" and row.make is compression.gear is gear


def test_texts():
    assert compressed_form("gear") == compressed_form("gear:4") == {"bits": 4, "block": 64, "rank": 2, "outliers": 0.02}
    assert compressed_form("gear:2,rank=0")["rank"] == 0
    assert compressed_form("int8") is compressed_form(None) is None
    assert of_drafts("gear:4") is None and of_drafts("int8") == "int8"
    target = gear(tiny_llama(), 2, block=8, outliers=0)
    assert target.model.config.cache_dtype == "gear:2,block=8,rank=2,outliers=0"
    assert target.model is gear(tiny_llama(), 2, block=8, outliers=0.0).model  # so that nothing is compiled again


def bits_per_number(target, slots=4096):
    size = lambda capacity: sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(lambda: target.model.init_cache(None, None, 1, capacity)))
    )
    numbers = 2 * target.model.config.num_layers * target.model.config.num_kv_heads * target.model.config.head_dim
    return 8 * (size(2 * slots) - size(slots)) / (slots * numbers)


@pytest.mark.parametrize(("bits", "rank"), [(2, 2), (4, 2), (4, 0)])
def test_the_memory_of_a_long_cache(bits, rank):
    """Heads of 64 and blocks of 64: two float16 numbers, two outliers with an index, and the factors per vector."""
    target = gear(tiny_llama(head_dim=64), bits, rank=rank)
    assert bits_per_number(target) == bits + (2 * 16 + 2 * (16 + 8) + rank * 32) / 64


def test_every_array_has_a_static_shape_and_no_step_compiles_again():
    target = gear(tiny_llama(), 4, block=8)
    prompts = [[1, 2, 3] * 9, [4, 5]]
    decode = lambda: specjax.decode(target, prompt_lookup(3), prompts, key=jax.random.key(0), max_new_tokens=30)
    first, programs = decode().to_lists(), run._cache_size()
    assert decode().to_lists() == first and run._cache_size() == programs


def test_steps_do_not_copy_the_blocks():
    """Rows that fill no block write to a scratch block, so that the cache passes through no branch."""
    target = gear(tiny_llama(), 4, block=8)
    prompts = jnp.ones((4, 384), jnp.int32), jnp.full((4,), 384)
    job = prepare(target, prompt_lookup(3), prompts, Settings(), key=jax.random.key(0), max_new_tokens=32)
    loops = run.lower(job).compile().as_text().split("ENTRY")[0]
    count = -(-job.tokens.shape[1] // SLOTS) * SLOTS // 8 + 1
    shape = f"u8[2,4,2,{count},8,4]"
    assert shape in loops
    assert [line for line in loops.splitlines() if f"= {shape}" in line and " copy(" in line] == []


def test_rounding_is_named():
    assert explain_rounding(gear(tiny_llama(), 4, block=8)).startswith("the gear:4,block=8")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda: tiny_llama(window=8), "because its attention has windows"),
        (lambda: tiny_hybrid(16), "because it has recurrent layers or layers of several kinds"),
        (lambda: tiny_llama(head_dim=6, width=24), "because its heads of 6 numbers do not fill whole bytes"),
        (lambda: tiny_llama(dtype="bfloat16", same_bits=True), "because same_bits is not shown for it"),
        (markov, "gear needs a model with a cache of keys and values, which markov does not have"),
    ],
)
def test_unsupported_models(target, words):
    with pytest.raises(UsageError, match=words) as error:
        gear(target(), 2)
    assert "\n" not in str(error.value)


def test_a_mesh_is_refused():
    target = tiny_llama()
    with pytest.raises(UsageError, match="because it is spread over a mesh"):
        make_model(dataclasses.replace(target.model.config, cache_dtype="gear:4"), specjax.mesh(data=1))


def test_trees_that_are_deeper_than_a_block_are_refused():
    target = gear(tiny_llama(), 4, block=4)
    draft = specjax.drafters.two_model(tiny_llama(), tree=parse("2x1x1x1"))
    with pytest.raises(UsageError, match=r"trees are 4 tokens deep, but the cache of .* accepts 3"):
        specjax.decode(target, draft, [[1, 2, 3]], key=jax.random.key(0), max_new_tokens=4)


@pytest.mark.parametrize("options", [{"bits": 3}, {"block": 5}, {"rank": 65}, {"outliers": 1.5}])
def test_options_out_of_range(options):
    with pytest.raises(UsageError, match=f"^{next(iter(options))} must be"):
        gear(tiny_llama(), **options)


def test_bfloat16_and_its_bits():
    """A cache that stores bfloat16 as its bits has the same values."""
    target = tiny_llama(dtype="bfloat16")
    prompts = [list(range(1, 50))]
    texts = [
        specjax.decode(
            dataclasses.replace(target, model=make_model(dataclasses.replace(
                target.model.config, cache_dtype="gear:4,block=8", cache_bits=bits
            ))), "autoregressive", prompts, key=jax.random.key(0), max_new_tokens=20,
        ).to_lists()
        for bits in (False, True)
    ]  # fmt: skip
    np.testing.assert_array_equal(*texts)
