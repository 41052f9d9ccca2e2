"""Costs of passes from their three sources."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_llama

from specjax import Target, controllers, costs, decode, drafters
from specjax.costs import curves
from specjax.errors import UsageError
from specjax.models import make_model
from specjax.models.storage import SCHEMES, quantize_params
from specjax.types import Sampling


def test_measured_passes_read_different_tokens(monkeypatch):
    """Equal tokens choose equal experts, so a pass over many of them would seem to cost no more than one."""
    read, run = [], curves._timed_pass
    monkeypatch.setattr(curves, "_timed_pass", lambda *a: read.append(np.asarray(a[3])) or run(*a))
    costs.measured(tiny_llama(), (1, 4), batch=2, context=16, repeats=1)
    assert {tokens.shape for tokens in read} == {(2, 1), (2, 4)}
    assert all(len(np.unique(tokens)) > 4 for tokens in read if tokens.shape == (2, 4))


def test_short_passes_are_timed_in_a_loop(monkeypatch):
    """A loop computes the same as one pass, and its result needs all of its passes."""
    counts, run = set(), curves._timed_pass
    monkeypatch.setattr(curves, "_timed_pass", lambda *a: counts.add(a[5]) or run(*a))
    for short, expected in ((10.0, {1, curves.CHAINED}), (0.0, {1})):
        counts.clear()
        monkeypatch.setattr(curves, "SHORT", short)
        costs.timed(tiny_llama(), (1, 2), context=16, repeats=1)
        assert counts == expected
    target, tokens = tiny_llama(), jnp.array([[1, 2, 3]])
    cache = target.model.init_cache(target.params, None, 1, 8)
    for sampling in (Sampling(), Sampling(jnp.float32(1))):
        one, many = (run(target, cache, jnp.int32(0), tokens, sampling, count)[0] for count in (1, 4))
        np.testing.assert_array_equal(one, many)


def test_measured_on_this_device():
    curve = costs.measured(tiny_llama(), (1, 4), context=16, repeats=3)
    assert curve.widths == (1, 4) and curve.costs[0] == 1.0 and curve.costs[1] > 0


def plan(**reports):
    """The JSON of a plan with these milliseconds."""
    entry = lambda n, ms: {"name": f"verify {n}", "compiles": ms is not None, "seconds": {"schedule": ms}}
    return {"widths": [entry(n.strip("_"), ms) for n, ms in reports.items()]}


def test_planned_from_a_report():
    curve = costs.planned(plan(_16=7.0, _1=4.0, _8=5.0, _32=None))
    np.testing.assert_allclose(curve((1, 8, 12)), [1, 1.25, 1.5])
    np.testing.assert_allclose(curve((8, 24)), [1, 9 / 5])  # beyond the last width by the last slope
    for other in ({}, {"widths": [{"name": "step"}]}, []):
        with pytest.raises(UsageError, match="specjax plan --json"):
            costs.planned(other)


def test_a_curve_numbers_or_the_rule_of_thumb():
    curve = costs.Curve((1, 3), (1.0, 2.0))
    np.testing.assert_allclose(costs.evaluate(curve, (1, 2), 4), [1, 1.5])
    np.testing.assert_allclose(costs.evaluate((1.0, 1.2), (1, 2), 4), [1, 1.2])
    np.testing.assert_allclose(
        costs.evaluate(None, (1, 2), 4, "float32", "tpu"), costs.estimated((1, 2), 4, "float32", "tpu")
    )
    assert drafters.auto(9, costs=curve) is drafters.auto(9, costs=costs.Curve((1, 3), (1.0, 2.0)))  # compiles nothing


def test_estimated_rises_with_width_and_batch():
    for dtype in ("float32", "bfloat16"):
        for batch in (1, 16):
            costs_by_width = costs.estimated((1, 4, 8, 32), batch, dtype, "cpu")
            assert costs_by_width[0] == 1 and (np.diff(costs_by_width) > 0).all()


@pytest.mark.parametrize("which", ["auto", "choice", "goodput"])
def test_the_rule_of_thumb_is_asked_for_the_rows_there_are(which, monkeypatch):
    """Every part that decides by costs and was given none estimates them for the rows of the batch."""
    batches = []

    def spy(widths, batch, *arguments, real=costs.estimated):
        batches.append(batch)
        return real(widths, batch, *arguments)

    monkeypatch.setattr(curves, "estimated", spy)
    lookup = drafters.prompt_lookup(3)
    drafter = {"auto": drafters.auto(64), "choice": drafters.choice(lookup, depths=(2,)), "goodput": lookup}[which]
    controller = controllers.goodput((0, 1, 2)) if which == "goodput" else None
    run = functools.partial(decode, tiny_llama(), drafter, key=jax.random.key(0), controller=controller)
    jax.eval_shape(lambda tokens: run((tokens, jnp.full(5, 3)), max_new_tokens=3).tokens, jnp.zeros((5, 8), jnp.int32))
    assert batches and set(batches) == {5}


def test_an_int8_target_has_costs_of_its_own_and_smaller_weights():
    target = tiny_llama()
    config = dataclasses.replace(target.model.config, quantized=(("*", SCHEMES["int8"]),))
    int8 = Target(make_model(config), quantize_params(target.params, config))
    assert (costs.dtype_of(target), costs.dtype_of(int8)) == ("float32", "int8")
    rounded = costs.estimated((1, 8, 16), 1, "int8", "cpu")
    np.testing.assert_allclose(rounded, [1, 1.119, 1.479], rtol=1e-5)
    weights = dataclasses.replace(config, quantized=(("*", SCHEMES["int8-weights"]),))
    rounded_weights = costs.dtype_of(Target(make_model(weights), quantize_params(target.params, weights)))
    assert rounded_weights.dtype == "float32" and 1 < rounded_weights.bytes < 1.3
    on_cpu = lambda dtype: costs.estimated((1, 4, 16), 1, dtype, "cpu")
    np.testing.assert_array_equal(on_cpu(rounded_weights), on_cpu("float32"))  # they are expanded
    assert costs.shares_of(int8, "v5e").logits > 3 * costs.shares_of(target, "v5e").logits
