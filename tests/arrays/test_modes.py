"""Float32 products of the library's programs have float32 precision, on every backend and in every part."""

import functools

import jax
import jax.numpy as jnp
import pytest
from heads import tiny_head
from tiers import exhaustive
from toy import tiny_llama

from specjax import make_drafter
from specjax.arrays.modes import jit, matmul_precision
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import run

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2
HEADS = ("clover", "dspark", "eagle3", "hamburger", "hydra", "m2r2", "medusa", "redrafter")


def products(jaxpr):
    """Yield the precision of each float32 product, also of kernels, branches and loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general" and equation.invars[0].aval.dtype == jnp.float32:
            yield equation.params["precision"]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner)


def traced(method):
    """Return the program of a method over a tiny model, which is traced anew for each precision."""
    target = tiny_llama(head_dim=128)  # which the kernels of TPUs take
    draft = tiny_head(method, target) if method in HEADS else tiny_llama(seed=1, layers=1)
    job = prepare(
        target, make_drafter(method, target, draft), ([[1, 2, 3]]), Settings(), key=jax.random.key(0), max_new_tokens=8
    )
    return run.trace(job).jaxpr


@pytest.mark.parametrize("method", ["two_model", "clover", *map(exhaustive, sorted({*HEADS} - {"clover"}))])
def test_every_product_of_target_draft_and_head_is_float32(method):
    precisions = list(products(traced(method)))
    assert len(precisions) > 20 and set(precisions) == {HIGHEST}


def test_the_callers_own_precision_is_kept():
    """It shows that the test above can fail: without the library's setting the products have no precision."""
    with jax.default_matmul_precision("tensorfloat32"):
        assert matmul_precision() == "tensorfloat32"
        assert (jax.lax.Precision.HIGH,) * 2 in set(products(traced("two_model")))
    assert matmul_precision() == "highest"


def test_a_product_with_its_own_precision_keeps_it():
    product = functools.partial(jnp.matmul, precision="default")
    (precision,) = products(jit(product).trace(jnp.ones((2, 2)), jnp.ones((2, 2))).jaxpr)
    assert precision == (jax.lax.Precision.DEFAULT,) * 2
