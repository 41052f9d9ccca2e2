"""`specjax.check_model`: models that keep their promises, and models that break one each, which is the one named."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own import LONGEST, VOCAB, Bag, bag_model, weights
from tiers import exhaustive, those
from toy import markov, tiny_llama
from toy_models import encoding, fold_in_order, inputs_of, recurrent, recurrent_model

from specjax import UsageError, check_model
from specjax.analysis.check_model import _ModelProbe
from specjax.arrays import batch_axes
from specjax.engine.prefill import CHUNK
from specjax.types import Target

GOOD = bag_model()


@pytest.mark.parametrize(
    ("make", "count"),
    [(markov, 12), exhaustive(recurrent, 11), *(exhaustive(make, 12) for make in (encoding, tiny_llama))],
    ids=["markov", "recurrent", "encoding", "llama"],
)
def test_the_toys_keep_theirs(make, count):
    target = make()
    inputs = inputs_of(3) if target.model.capabilities.inputs else None
    report = check_model(target.model, target.params, inputs=inputs)
    assert report and len(report.promises) == count
    assert str(report).startswith(
        f"{target.model.name} keeps all {count} promises; logits that should be equal differ by "
    )


def whole(params, tokens):
    """Return the logits of one pass over a whole text, which are what the model is meant to compute."""
    batch, count = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((count, count), bool)), (batch, count, count))
    cache, positions = GOOD.init_cache(params, None, batch, 1), jnp.broadcast_to(jnp.arange(count), tokens.shape)
    return GOOD.forward(params, tokens, cache, positions=positions, mask=mask)[0].logits


@pytest.mark.exhaustive
def test_a_model_that_is_its_reference():
    report = check_model(GOOD, weights(), reference=whole)
    assert report and [promise.name for promise in report.promises] == [
        "reference", "causal", "steps", "prompt", "rows", "commit", "rewind", "siblings", "tree", "branch", "pending",
        "capacity", "axes",
    ]  # fmt: skip


def reading(change):
    """The model with `change(tokens, cache, options)` of what a pass gets."""

    def forward(params, tokens, cache, **options):
        return GOOD.forward(params, tokens, cache, **change(tokens, cache, dict(options)))

    return GOOD._replace(forward=forward)


def saying(change):
    """The model with `change(logits, cache)` for its logits."""

    def forward(params, tokens, cache, **options):
        output, pending = GOOD.forward(params, tokens, cache, **options)
        return output._replace(logits=change(output.logits, cache)), pending

    return GOOD._replace(forward=forward)


def among(mask, visible):
    """The mask in which new tokens see `visible` bool[T, T] of each other."""
    new = jnp.arange(mask.shape[2]) >= mask.shape[2] - mask.shape[1]
    wide = jnp.pad(visible, ((0, 0), (mask.shape[2] - mask.shape[1], 0)))
    return jnp.where(new, wide, mask)


def of_chain(tokens, cache, options):
    count = tokens.shape[1]
    return options | {"mask": among(options["mask"], jnp.tril(jnp.ones((count, count), bool)))}


def both_ways(tokens, cache, options):
    count = tokens.shape[1]
    return options | {"mask": among(options["mask"], jnp.ones((count, count), bool))}


def shifted_steps(by):
    return lambda tokens, cache, options: options | {"positions": options["positions"] + by * (tokens.shape[1] == 1)}


def own_count(tokens, cache, options):
    return options | {"positions": options["positions"] - options["positions"][:, :1]}


def without_earlier(tokens, cache, options):
    if options.get("earlier") is None:
        return options
    hidden = jnp.arange(options["mask"].shape[2]) < options["mask"].shape[2] - tokens.shape[1]
    return options | {"mask": options["mask"] & ~hidden}


def keeps_one_more(cache, pending, path, num_nodes):
    width = path.shape[1]
    more = jnp.minimum(num_nodes + (width < CHUNK), width)
    return GOOD.commit(cache, pending, jnp.where(jnp.arange(width) < more[:, None], jnp.arange(width), -1), more)


def keeps_padding(cache, pending, path, num_nodes):
    return GOOD.commit(cache, pending, jnp.broadcast_to(jnp.arange(path.shape[1]), path.shape), path.shape[1])


def first_nodes(cache, pending, path, num_nodes):
    return GOOD.commit(cache, pending, jnp.where(path >= 0, jnp.arange(path.shape[1]), -1), num_nodes)


def in_half(cache, pending, path, num_nodes):
    return jax.tree.map(lambda x: x.astype(jnp.float16), GOOD.commit(cache, pending, path, num_nodes))


BROKEN = {
    "rewind that keeps rejected rows": (
        GOOD._replace(rewind=lambda cache, length: cache), "rewind",
        "tokens that were removed by a rewind still influence the cache: their",
    ),
    "commit that keeps them": (
        GOOD._replace(commit=keeps_one_more), "commit", "drafted tokens that were not committed still influence",
    ),
    "commit that keeps what is behind a prompt": (
        GOOD._replace(commit=keeps_padding), "prompt", "reading a prompt in one pass leaves another cache",
    ),
    "commit of another path": (
        GOOD._replace(commit=first_nodes), "branch", "committing a branch of a tree leaves another cache than",
    ),
    "positions one too high in steps": (
        reading(shifted_steps(1)), "steps", "; a pass over one token counts positions one too high",
    ),
    "positions one too low in steps": (
        reading(shifted_steps(-1)), "steps", "; a pass over one token counts positions one too low",
    ),
    "positions counted by the pass": (reading(own_count), "steps", "; the model ignores `positions`"),
    "rows that mix": (
        saying(lambda x, cache: x + 0.1 * x.mean(0)), "rows", "a row of a batch gives other logits than the row alone",
    ),
    "siblings that are seen": (
        reading(of_chain), "siblings", "a node of a tree sees nodes that are not its ancestors",
    ),
    "tokens behind that are seen": (
        reading(both_ways), "causal", "the logits of a token depend on later tokens",
    ),
    "pending tokens that are not": (
        reading(without_earlier), "pending", "pending tokens are read differently from",
    ),
    "capacity that matters": (
        saying(lambda x, cache: x * (1 + cache.values.shape[1] / 1000)), "capacity",
        "a cache of another capacity gives other logits",
    ),
    "axes of other arrays": (
        GOOD._replace(axes=batch_axes.shared), "form",
        "axes of the model bag must give the batch axis of each array",
    ),
    "axes of the row before": (
        GOOD._replace(axes=lambda tree: Bag(1, 0) if isinstance(tree, Bag) else 0), "axes",
        "a row that is put into another batch by `axes`",
    ),
    "logits of another vocabulary": (
        saying(lambda x, cache: x[..., 1:]), "form",
        f"must return logits as floats [3, 6, {VOCAB}], not float32[3, 6, 15]",
    ),
    "no numbers": (saying(lambda x, cache: x * jnp.nan), "finite", "its logits are NaN or infinite"),
    "a memory of another dtype": (GOOD._replace(commit=in_half), "form", "commit of the model bag must return"),
}  # fmt: skip


REPEATED = (
    "commit of another path", "positions counted by the pass",
    "positions one too low in steps", "commit that keeps what is behind a prompt", "axes of other arrays",
    "pending tokens that are not", "capacity that matters", "axes of the row before",
)  # fmt: skip


@pytest.mark.parametrize("broken", those([name for name in BROKEN if name not in REPEATED], BROKEN))
def test_what_is_broken_is_named_in_one_sentence(broken):
    model, name, words = BROKEN[broken]
    report = check_model(model, weights())
    assert not report and [promise.name for promise in report.promises if not promise.holds] == [name], report
    assert words in str(report) and "\n" not in str(report)
    if name not in ("form", "finite"):
        assert f"(allowed: {report.tolerance:.2g}) at row " in str(report)
        assert report.promises[-1].largest > 10 * report.tolerance


def late(tokens, cache, options):
    return options | {"positions": options["positions"] + 1}


@pytest.mark.exhaustive
def test_without_a_reference_a_mistake_of_every_pass_makes_a_model_like_any_other():
    assert check_model(reading(late), weights())


def test_a_mistake_of_every_pass_is_found_by_a_reference():
    report = check_model(reading(late), weights(), reference=whole)
    assert "other logits than `reference`" in str(report) and str(report).endswith(
        "; the model counts positions one too high"
    )
    assert [promise.name for promise in report.promises] == ["reference"]


@pytest.mark.exhaustive
def test_a_recurrence_that_ignores_the_tree():
    target = Target(recurrent_model(12, fold_in_order), recurrent().params)
    assert "sees nodes that are not its ancestors" in str(check_model(target.model, target.params))


@pytest.mark.exhaustive
def test_what_may_differ():
    worse = saying(lambda x, cache: x * (1 + cache.values.shape[1] / 1e6))
    exact = check_model(worse, weights(), tolerance=1e-4)
    assert not exact and exact.promises[-1].name == "capacity" and exact.tolerance == 1e-4
    assert check_model(worse, weights(), tolerance=0.1)


@pytest.mark.exhaustive
def test_more_may_differ_in_short_dtypes():
    in_half = {name: x.astype(jnp.bfloat16) for name, x in weights().items()}
    report = check_model(GOOD, in_half)
    assert report and np.isclose(report.tolerance / check_model(GOOD, weights()).tolerance, 50, rtol=0.1)


def test_a_model_of_very_short_texts_is_refused():
    with pytest.raises(UsageError, match=f"max_positions of the model is 8.*texts of {19}"):
        check_model(GOOD._replace(max_positions=8), weights())
    assert LONGEST > 19


def test_what_is_no_model_and_what_is_no_reference():
    with pytest.raises(UsageError, match=r"not Target; for a target call check_model\(target.model, target.params\)"):
        check_model(Target(GOOD, weights()), weights())
    for reference, wrong in (
        (lambda params, tokens: (whole(params, tokens), None), "tuple"),
        (lambda params, tokens: whole(params, tokens)[:, :, :1], r"\[3, 19, 1\]"),  # which would be compared
    ):
        report = check_model(GOOD, weights(), reference=reference)
        assert not report
        message = rf"reference must return logits \[3, 19, {VOCAB}\] for tokens \[3, 19\], not {wrong}"
        assert re.search(message, str(report))


def test_what_is_computed_in_bfloat16_is_rounded():
    """A model of float32 parameters whose products are of bfloat16 counts as short, as most Flax modules do."""

    def forward(params, tokens, cache, **options):
        short = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, cache))
        return GOOD.forward(short[0], tokens, short[1]._replace(length=cache.length), **options)

    limit = [_ModelProbe(model, weights(), None, 0).is_short() for model in (GOOD, GOOD._replace(forward=forward))]
    assert limit == [False, True]
