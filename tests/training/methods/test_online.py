"""A drafter that learns while it serves: what is recorded, what a step learns from, and a target that changes."""

import functools

import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from toy_models import alike

import specjax
from specjax import UsageError
from specjax.drafters import autoregressive, two_model
from specjax.models.heads.kinds import init_head
from specjax.serving.requests import Request
from specjax.training.data.packing import PackedBatch
from specjax.training.loop.step import export_trainable, init_state
from specjax.training.methods.online import (
    RejectionRecorder,
    empty_record,
    find_positions,
    plan_updates,
    send_params,
    update,
)
from specjax.training.objectives.unroll import forward_packed
from specjax.types import Capabilities, Output, Target


def record_of(*steps, prompt=(1, 2, 3), size=12):
    watch = RejectionRecorder(1, size)
    for i, (tokens, accepted, drafted) in enumerate(steps):
        watch.add_step("text", prompt, tokens, accepted, drafted, i + 1 == len(steps))
    assert watch.is_full
    return watch.take_record()


def marks(row):
    return np.flatnonzero(row).tolist()


def test_what_took_the_place_of_a_rejected_draft_is_recorded():
    """T4 (a): behind 1 2 3 a b c is drafted, and b, at place 4, rejected: the logits of place 3 say it."""
    record = record_of(([10, 20], 1, 3))
    assert marks(record.rejected[0]) == [4] and marks(record.roots[0]) == [2]
    assert record.tokens[0].tolist() == [1, 2, 3, 10, 20] + [0] * 7 and record.length.tolist() == [5]
    assert find_positions(record, whole_rounds=False)[0, 0] + 1 == 3  # the place whose logits are judged
    assert find_positions(record, whole_rounds=True)[0, 0] + 1 == 2  # the root of that round
    assert (find_positions(record, False)[0, 1:] == -1).all() and find_positions(record, False, 1).shape == (1, 1)


def test_rounds_without_a_rejection_leave_nothing():
    """T4 (b): all accepted with the bonus token; an end among the accepted; nothing drafted."""
    record = record_of(([10, 20, 30, 40], 3, 3), ([50], 0, 0), ([60], 1, 3))
    assert not record.rejected.any() and not record.roots.any() and record.length.tolist() == [9]


def test_what_does_not_fit_is_left_out_and_the_oldest_goes():
    record = record_of(([10, 20], 0, 2), ([30], 0, 2), size=4)
    assert record.tokens.tolist() == [[1, 2, 3, 10]] and marks(record.rejected[0]) == [3]
    watch = RejectionRecorder(2, 4)
    for name in range(3):
        watch.add_step(name, [name], [5], 0, 1, "eos")
    assert watch.is_full and watch.record.tokens[:, 0].tolist() == [2, 1]
    assert int(watch.take_record().total) == 3 and not watch.is_full and int(watch.record.total) == 0


@functools.cache
def table_model(vocab: int):
    """Logits by the last token; params: {"table": float32[V, V]}."""

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        logits = params["table"][tokens]
        return Output(logits, logits), ()

    return toy.markov_model(vocab)._replace(forward=forward, name="table", capabilities=Capabilities())


VOCAB = 24


@functools.cache
def target():
    return Target(table_model(VOCAB), {"table": 3 * jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))})


@functools.cache
def draft():
    return alike(target(), 1.0)


def test_a_step_learns_from_the_recorded_places_alone():
    """T4 (c): the loss of a record is the mean over its rejections, gathered by hand."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 16)).astype(np.int32)
    record = empty_record(2, 16)._replace(
        tokens=tokens, length=jnp.array([16, 12]),
        rejected=jnp.zeros((2, 16), bool).at[0, jnp.array([5, 9])].set(True).at[1, 7].set(True),
    )  # fmt: skip
    plan = plan_updates(draft())
    state, fixed = init_state(plan, draft().params)
    new, outcome = update(plan, state, fixed, target(), record)
    batch = PackedBatch(tokens, np.zeros_like(tokens), np.ones(tokens.shape, bool))
    logits = jax.jit(lambda model: model.model.unembed(model.params, hidden_of(model, batch)))
    p, log_q = jax.nn.softmax(logits(target())), jax.nn.log_softmax(logits(draft()))
    each = -jnp.sum(p * log_q, -1)
    assert float(outcome.loss) == pytest.approx(float(each[0, 4] + each[0, 8] + each[1, 6]) / 3, rel=1e-5)
    assert outcome.report.tokens == 3 and int(new.step) == 1
    same, _ = update(plan, state, fixed, target(), record._replace(rejected=jnp.zeros((2, 16), bool)))
    jax.tree.map(np.testing.assert_array_equal, same, state)


def hidden_of(model, packed):
    return forward_packed(model.model, model.params, packed)[0].hidden


def serving(prompts):
    requests = (Request(prompt, key=0) for prompt in prompts)
    return specjax.serve(target(), two_model(draft(), 3), requests, slots=4, longest_prompt=4, max_new_tokens=20)


def test_text_is_the_targets_while_the_drafter_learns_and_it_drafts_better():
    """T4 (e), in `serve`, whose drafter gets its new parameters between two steps."""
    prompts = np.random.default_rng(0).integers(0, VOCAB, (16, 4)).tolist()
    plain = specjax.decode(target(), autoregressive(), prompts, key=0, max_new_tokens=20).to_lists()
    plan = plan_updates(draft(), learning_rate=0.1)

    def served(learns):
        """(texts, rounds, updates)."""
        state, fixed = init_state(plan, draft().params)
        watch, texts, rounds, updates = RejectionRecorder(4, 24), {}, 0, 0
        steps = serving(prompts)
        step = next(steps, None)
        while step is not None:
            watch.add_step(
                step.request, prompts[step.request], step.tokens, step.accepted, step.drafted, step.finish_reason
            )
            texts.setdefault(step.request, []).extend(step.tokens)
            rounds += 1
            params = None
            if watch.is_full and learns:
                state, _ = update(plan, state, fixed, target(), watch.take_record())
                params, updates = export_trainable(draft(), state, fixed).params, updates + 1
            step = send_params(steps, params)
        return [texts[i] for i in range(len(prompts))], rounds, updates

    (texts, rounds, updates), (same, frozen, none) = served(True), served(False)
    assert texts == same == plain and (updates, none) == (4, 0)
    assert rounds < frozen
    steps = serving(prompts)
    next(steps)
    with pytest.raises(UsageError, match="shapes and dtypes"):
        send_params(steps, {"table": jnp.zeros((2, 2))})


def test_a_head_learns_of_the_round_in_which_it_was_rejected():
    """The second draft of a round from root 4 was: of that round alone, at its second depth."""
    target = toy.tiny_llama()
    head = init_head("medusa", heads.config_of("medusa", target), jax.random.key(0))
    record = empty_record(1, 16)._replace(
        tokens=jnp.arange(16)[None] % 7, length=jnp.array([16]), rejected=jnp.zeros((1, 16), bool).at[0, 6].set(True),
        roots=jnp.zeros((1, 16), bool).at[0, 4].set(True),
    )  # fmt: skip
    plan = plan_updates(head, depths=3)
    state, fixed = init_state(plan, head.params)
    _, outcome = update(plan, state, fixed, target, record)
    assert marks(outcome.report.loss) == [1] and outcome.finite


def test_acceptance_falls_when_the_target_changes_and_comes_back():
    """T4 (f): a table as draft, texts of a table of the target, and then of the same with its tokens renamed."""
    vocab, rng = 8, np.random.default_rng(0)
    rows = rng.dirichlet(np.full(vocab, 0.5), vocab) + 1e-3
    rows = np.log(rows / rows.sum(1, keepdims=True)).astype(np.float32)
    other = rows[rng.permutation(vocab)][:, rng.permutation(vocab)]
    model = table_model(vocab)
    trainable = Target(model, {"table": jnp.zeros((vocab, vocab))})
    plan = plan_updates(trainable, learning_rate=0.2)
    state, fixed = init_state(plan, trainable.params)
    prompts = rng.integers(0, vocab, (8, 2)).tolist()
    accepted, frozen = [], None
    for batch, truth in enumerate([rows] * 12 + [other] * 12):
        target, watch = Target(model, {"table": jnp.asarray(truth)}), RejectionRecorder(8, 40)
        if batch == 12:
            frozen = state
        drafter = two_model(export_trainable(trainable, state, fixed), 2)
        took = np.zeros(2)
        for step in specjax.stream(target, drafter, prompts, key=batch, max_new_tokens=32, temperature=1.0):
            info = step.info
            took += [info.accepted.sum(), info.drafted.sum()]
            ended = info.hit_eos | ~info.active
            for row, tokens in enumerate(step.tokens):
                if info.active[row]:
                    watch.add_step(row, prompts[row], tokens, info.accepted[row], info.drafted_depth[row], ended[row])
        for row in range(8):
            watch.end_text(row)
        accepted.append(took[0] / took[1])
        state, _ = update(plan, state, fixed, target, watch.take_record())
    adapted, shifted, back = accepted[11], accepted[12], accepted[-1]
    assert adapted > accepted[0] + 0.2 and shifted < adapted - 0.2 and back > shifted + 0.15
    overlap = lambda state: float(
        jnp.minimum(jax.nn.softmax(other), jax.nn.softmax(state.trained["table"])).sum(1).mean()
    )
    assert overlap(state) > overlap(frozen) + 0.15
