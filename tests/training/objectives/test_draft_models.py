"""Draft models: losses at aligned positions, on-policy data, and tokens per pass that are measured without decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from tiers import those
from toy_models import alike

import specjax
from specjax import UsageError
from specjax.drafters import autoregressive, two_model
from specjax.models import narrow_mlps, prune_layers
from specjax.models.vocabulary import resize_vocabulary
from specjax.training.data.packing import TrainingText, choose_round_starts, pack
from specjax.training.loop.trainer import train
from specjax.training.measure.acceptance_eval import measure_acceptance
from specjax.training.objectives import losses
from specjax.training.objectives.draft_models import OnPolicy, chain_acceptance, resample_responses
from specjax.training.objectives.recipes import recipe_of
from specjax.training.objectives.trainables import StepBatch, build_model_objective
from specjax.training.objectives.trainables import compute_loss as compute_step_loss
from specjax.types import Target

NEW, DEPTHS, LENGTH = 24, 3, 40


@functools.cache
def target():
    return toy.tiny_llama(layers=3, stacked=True)


@functools.cache
def draft():
    return alike(target(), 0.1)


@functools.cache
def texts() -> list[TrainingText]:
    """Prompts of several lengths, and what the target writes."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 60, n).tolist() for n in (6, 3, 9, 5)]
    result = specjax.decode(target(), autoregressive(), prompts, key=0, max_new_tokens=NEW)
    return [
        TrainingText((*prompt, *text), len(prompt)) for prompt, text in zip(prompts, result.to_lists(), strict=True)
    ]


def compute_loss(recipe, model, params, target, packed, places, chunk=None, parts=1):
    batch = StepBatch(packed, places, jax.random.split(jax.random.key(0), len(packed.tokens)))
    return compute_step_loss(build_model_objective(model), recipe, params, target, batch, chunk, parts)


@functools.partial(jax.jit, static_argnames=("recipe", "chunk"))
def loss_and_gradient(recipe, draft, target, packed, places, chunk=None):
    def loss(params):
        return compute_loss(recipe, draft.model, params, target, packed, places, chunk)

    (value, report), gradient = jax.value_and_grad(loss, has_aux=True)(draft.params)
    return value, report, gradient


compiled_loss = jax.jit(compute_loss, static_argnames=("recipe", "model", "chunk"))


def logits_of(model: Target, tokens):
    """float32[T, V] of one text."""
    return _logits(model, np.pad(tokens, (0, LENGTH - len(tokens))))[: len(tokens)]


@jax.jit
def _logits(model: Target, tokens):
    size = len(tokens)
    cache = model.model.init_cache(model.params, None, 1, 1)
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    tokens, positions = jnp.asarray(tokens, jnp.int32)[None], jnp.arange(size)[None]
    return model.model.forward(model.params, tokens, cache, positions=positions, mask=mask)[0].logits[0]


def test_a_packed_lesson_is_the_mean_over_the_answers_of_its_texts():
    """R3, R4: alignment, masks, packing and chunks, against each text alone and by hand."""
    recipe = recipe_of("distillspec")
    (packed,) = pack(texts(), 2, 2 * LENGTH)
    places = choose_round_starts(packed, 2 * LENGTH)
    unchunked, chunked = (loss_and_gradient(recipe, draft(), target(), packed, places, chunk) for chunk in (None, 16))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), unchunked, chunked)
    value, report, _ = unchunked
    parts = []
    for text in texts():
        p, q = (jax.nn.log_softmax(logits_of(model, text.tokens)) for model in (target(), draft()))
        parts.append(
            jnp.sum(jnp.exp(p) * (p - q), -1)[text.prompt_length - 1 : -1]
        )  # of position t, which says x_{t+1}
    assert report.tokens == sum(map(len, parts)) == 4 * NEW
    assert float(value) == pytest.approx(float(jnp.concatenate(parts).mean()), rel=1e-4)
    assert float(value) != pytest.approx(float(jnp.concatenate([part[1:] for part in parts]).mean()), rel=1e-4)


def test_cross_entropy_needs_no_target_and_others_say_that_they_do():
    (packed,) = pack(texts()[:2], 2, LENGTH)
    places = choose_round_starts(packed, 24)
    recipe = recipe_of("fastdraft")
    with_it, without = (
        compiled_loss(recipe, draft().model, draft().params, x, packed, places)[0] for x in (target(), None)
    )
    assert float(with_it) == pytest.approx(float(without), rel=1e-6)
    log_probs = [jax.nn.log_softmax(logits_of(draft(), text.tokens)) for text in texts()[:2]]
    each = [
        q[np.arange(len(q) - 1), text.tokens[1:]][text.prompt_length - 1 :]
        for q, text in zip(log_probs, texts(), strict=False)
    ]
    assert float(without) == pytest.approx(-float(jnp.concatenate(each).mean()), rel=1e-4)
    everywhere = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))  # prompts do not count, wherever drafts begin
    packed_loss, report = compiled_loss(recipe, draft().model, draft().params, None, packed, everywhere)
    assert report.tokens == 2 * NEW and float(packed_loss) == pytest.approx(float(without), rel=1e-5)
    with pytest.raises(UsageError, match="only the loss ce needs no target"):
        compute_loss(recipe_of("direct_alignment"), draft().model, draft().params, None, packed, places)
    with pytest.raises(UsageError, match="24 positions of a row, but 7 does not"):
        compute_loss(recipe, draft().model, draft().params, target(), packed, places, 7)


def test_models_of_other_vocabularies_meet_in_the_ids_that_both_have():
    (packed,) = pack(texts()[:2], 2, LENGTH)
    places = choose_round_starts(packed, 24)
    small = toy.tiny_llama(seed=1, layers=1, vocab=50)
    value, report, gradient = loss_and_gradient(recipe_of("distillspec"), small, target(), packed, places)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradient)))
    assert (
        int(report.tokens)
        == sum((np.array(text.tokens[text.prompt_length :]) < 50).sum() for text in texts()[:2])
        < 2 * NEW
    )
    tokens = packed._replace(tokens=np.minimum(packed.tokens, 49))
    loss = jax.jit(
        lambda: compute_loss(recipe_of("distillspec"), target().model, target().params, small, tokens, places)
    )()
    assert np.isfinite(loss[0]) and int(loss[1].tokens) == 2 * NEW
    same = resize_vocabulary(small.model, 64)
    hits = chain_acceptance(small.model, small.params, target(), packed, DEPTHS)
    np.testing.assert_array_equal(hits, chain_acceptance(same, small.params, target(), packed, DEPTHS))


@pytest.mark.parametrize("depths", those([4], [1, 4]))
def test_predicted_is_served(depths):
    """Every pass of the decoder, for a draft model that errs now and then."""
    measured = measure_acceptance(target(), draft(), texts(), depths=depths, rows=2, length=2 * LENGTH)
    prompts = [list(text.tokens[: text.prompt_length]) for text in texts()]
    result = specjax.decode(target(), two_model(draft(), depths), prompts, key=0, max_new_tokens=NEW)
    assert [tuple(text) for text in result.to_lists()] == [text.tokens[text.prompt_length :] for text in texts()]
    assert measured.tokens == 4 * NEW and measured.passes == int(np.sum(result.stats.target_passes))
    assert 1.1 < measured.per_pass < depths + 0.9, "neither all nor nothing"


def test_pruned_layers_are_those_of_the_target():
    unpruned = prune_layers(target(), [0, 1, 2])
    assert unpruned.model is target().model
    few = prune_layers(target(), [0, 2])
    assert few.model.capabilities.num_layers == 2
    np.testing.assert_array_equal(
        few.params["layers"]["mlp"]["up"]["weight"][1], target().params["layers"]["mlp"]["up"]["weight"][2]
    )
    unstacked = toy.tiny_llama(layers=3)
    other = prune_layers(unstacked, [2])
    np.testing.assert_array_equal(
        other.params["layers"][0]["mlp"]["up"]["weight"], unstacked.params["layers"][2]["mlp"]["up"]["weight"]
    )
    tokens = texts()[0].tokens
    assert not np.allclose(logits_of(few, tokens), logits_of(prune_layers(target(), [2, 0]), tokens))
    spread = specjax.shard(target(), specjax.parallel.mesh(1, 2), over=())
    assert prune_layers(spread, [0, 2]).model.over == narrow_mlps(spread, 8).model.over == ()
    with pytest.raises(UsageError, match="layers 0 to 2; choose one or more of these"):
        prune_layers(target(), [3])
    with pytest.raises(UsageError, match="has no numbered layers"):
        prune_layers(toy.markov(), [0])


def test_the_draft_models_own_answers_take_the_place_of_the_targets():
    (packed,) = pack(texts()[:3], 4, LENGTH, one_per_row=True)
    resampled = resample_responses(draft(), packed, jax.random.key(3), eos=(), temperature=0.0)
    prompts = [text.tokens[: text.prompt_length] for text in texts()[:3]]
    answers = specjax.decode(draft(), autoregressive(), prompts, key=0, max_new_tokens=LENGTH).to_lists()
    for row, text in enumerate(texts()[:3]):
        np.testing.assert_array_equal(resampled.tokens[row], [*prompts[row], *answers[row]][:LENGTH])
        np.testing.assert_array_equal(resampled.loss_mask[row], np.arange(LENGTH) >= text.prompt_length)
    assert not resampled.loss_mask[3].any()
    eos = int(resampled.tokens[0, texts()[0].prompt_length + 4])
    ended = resample_responses(draft(), packed, jax.random.key(3), eos=(eos,), temperature=0.0)
    end = texts()[0].prompt_length + int(np.argmax(resampled.tokens[0, texts()[0].prompt_length :] == eos)) + 1
    assert ended.loss_mask[0].sum() == end - texts()[0].prompt_length and (ended.text_start[0, end:] == end).all()
    short = dataclasses.replace(draft(), model=draft().model._replace(max_positions=LENGTH))
    long = [TrainingText((1,) * LENGTH, LENGTH - 3), texts()[1]]
    (packed,) = pack(long, 2, LENGTH, one_per_row=True)
    few = resample_responses(short, packed, jax.random.key(3), eos=(), temperature=0.0)
    assert few.loss_mask.sum(1).tolist() == [3, 3], "as many as the longest prompt leaves places for"
    (packed,) = pack(texts(), 2, 2 * LENGTH)
    with pytest.raises(UsageError, match="pack one per row"):
        resample_responses(draft(), packed, jax.random.key(0), eos=())


def test_a_share_of_the_steps_after_the_first_is_on_policy():
    (packed,) = pack(texts()[:2], 2, LENGTH, one_per_row=True)
    none, some, every = (OnPolicy((), share, warmup=0.2) for share in (0.0, 0.5, 1.0))
    replaced = lambda policy: [policy(step, 10, packed, draft()) is not packed for step in range(10)]
    assert replaced(none) == [False] * 10 and replaced(every) == [False] * 2 + [True] * 8
    assert 1 <= sum(replaced(some)) <= 7


@pytest.mark.parametrize("name", those(["distillspec"], ["distillspec", "fastdraft", "direct_alignment"]))
def test_training_brings_a_pruned_target_back(name):
    """R7: on the target's answers, DistillSpec with the student's own mixed in; FastDraft without the target."""
    start = prune_layers(target(), [0, 2])
    needed, data = (None, None) if name == "fastdraft" else (target(), OnPolicy((), 0.3))
    recipe = recipe_of(name, learning_rate=3e-3)
    fitted = train(
        needed, start, texts(), recipe=recipe, replace_batch=data, rows=4, length=LENGTH, epochs=30, chunk=20
    )
    rate = lambda trainable: (
        measure_acceptance(target(), trainable, texts(), depths=DEPTHS, rows=2, length=2 * LENGTH).per_pass
    )
    assert rate(start) + 0.2 < rate(fitted)


@pytest.mark.parametrize(("name", "expected"), [("kl", (0.4, 0.25, 0.35)), ("rkl", (0.35068, 0.32466, 0.32466))])
def test_a_draft_that_sees_no_context_is_a_mean_of_the_contexts(name, expected):
    """T1 (f): arithmetic for KL, geometric for its reverse."""
    p = jnp.log(jnp.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))
    both = lambda z: jnp.tile(z, (2, 1))
    step = jax.grad(lambda z: jnp.mean(losses.LOSSES[name](both(z), p, jnp.zeros(2, jnp.int32), jnp.ones(2))))
    z = jax.lax.fori_loop(0, 300, lambda _, z: z - step(z), jnp.zeros(3))
    np.testing.assert_allclose(jax.nn.softmax(z), expected, atol=1e-4)


def test_answers_by_the_target_make_cross_entropy_the_divergence():
    """T3 (c): the mean gradient over N sampled answers is that of KL, but for an error that falls as 1 / sqrt(N)."""
    p, z = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    exact = jax.grad(lambda z: losses.forward_kl(z[None], p[None], None, None)[0])(z)
    labels = jax.random.categorical(jax.random.key(0), p, shape=(40_000,))
    each = jax.vmap(jax.grad(lambda z, label: losses.cross_entropy(z[None], None, label[None], None)[0]), (None, 0))
    error = lambda n: float(jnp.sqrt(jnp.mean((each(z, labels).reshape(-1, n, 3).mean(1) - exact) ** 2)))
    assert error(1000) < 0.02 and error(10) / error(1000) == pytest.approx(10, rel=0.35)


@pytest.mark.exhaustive
def test_a_run_on_its_own_answers_that_was_ended_goes_on_to_the_same_bits(tmp_path):
    """R6, with the draft model's samples as data."""
    settings = dict(
        recipe=recipe_of("distillspec"), replace_batch=OnPolicy((), 0.7, warmup=0.0), rows=2, length=LENGTH, epochs=3,
        chunk=20, evaluate_every=1,
    )  # fmt: skip
    start = prune_layers(target(), [1])
    uninterrupted = train(target(), start, texts(), **settings)

    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(target(), start, texts(), folder=tmp_path, on_progress=stop, **settings)
    again = train(target(), start, texts(), folder=tmp_path, **settings)
    jax.tree.map(np.testing.assert_array_equal, again.params, uninterrupted.params)
