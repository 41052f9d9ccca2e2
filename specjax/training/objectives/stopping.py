"""Training SpecDec++'s head, which says how likely a token of a draft model is accepted (`models.heads.acceptance`).

Huang, Guo, Wang: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (2024), arXiv 2405.19715.
Of a text X that the target wrote, the draft model proposes Y_i ~ q(. | X_<i), which is accepted with probability
a_i = min(1, p(Y_i) / q(Y_i)). It reads Z: X_i with probability r = 0.15, else Y_i; of what it then says of Y_i

    minimise sum of (w (1 - a_i) (-log(1 - s_i)) + a_i (-log s_i)) / sum of (w (1 - a_i) + a_i), w = 6

over the places where Y_i was read. The draft model stays as it is, and has no state in the optimizer.
Guarantee: decoding is as exact as before, whatever the head says.
Deviations: as in the paper, a_i is that behind X_<i, while the head sees what follows Z_<i. Prompts are not mixed. Both
distributions are at temperature 1. The learning rate is our own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.models.heads.acceptance import AcceptanceHead, init_acceptance
from specjax.models.vocabulary import beside
from specjax.training.data.packing import Lesson
from specjax.training.objectives.draft_models import POSITIONS, shared_logits
from specjax.training.objectives.head_objective import Report
from specjax.training.objectives.losses import acceptance_weighted
from specjax.training.objectives.unroll import one_pass
from specjax.types import STATIC, Array, Model, PyTree, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stopping:
    """A head to be trained (`loop.train`), beside the draft model whose tokens it judges."""

    model: Model = field(metadata=STATIC)
    params: PyTree  # "draft": of the model; "head": AcceptanceHead
    rejections: float = field(metadata=STATIC, default=6.0)  # w
    kept: float = field(metadata=STATIC, default=0.15)  # r

    @property
    def head(self) -> AcceptanceHead:
        return self.params["head"]


def stopping(draft: Target, num_blocks: int = 3, **settings: float) -> Stopping:
    """An untrained head of a draft model."""
    zero = np.zeros((1, 1), np.int32)
    lesson = Lesson(jnp.asarray(zero), jnp.asarray(zero), jnp.asarray(zero > 0))
    output = jax.eval_shape(lambda params: one_pass(draft.model, params, lesson)[0], draft.params)
    head = init_acceptance(output.hidden.shape[-1], num_blocks)
    return Stopping(draft.model, {"draft": draft.params, "head": head}, **settings)


class Examples(NamedTuple):
    """What a head is to say of a lesson."""

    features: Array  # [B, T, D], of the draft model behind each token that it read
    accepted: Array  # float32[B, T], how often the token is
    weight: Array  # float32[B, T], 1 where the draft model proposed what it read


def examples(model: Model, params: PyTree, target: Target, lesson: Lesson, key: Array, kept: float = 0.15) -> Examples:
    """Two passes of the draft model over a lesson and one of the target. Nothing is derived from them."""
    tokens, first, counts = (jnp.asarray(x) for x in lesson)
    choice, draw = jax.random.split(key)
    proposed, accepted = proposals(model, params, target, lesson, draw)
    inside = counts & (jnp.arange(tokens.shape[1]) > first)
    own = inside & (jax.random.uniform(choice, tokens.shape) >= kept)
    mixed = lesson._replace(tokens=jnp.where(own, proposed, tokens))
    features = one_pass(beside(model, target), params, mixed)[0].hidden
    return jax.lax.stop_gradient(Examples(features, accepted, own.astype(jnp.float32)))


def proposals(model: Model, params: PyTree, target: Target, lesson: Lesson, key: Array) -> tuple[Array, Array]:
    """(int32[B, T], float32[B, T]): of each place a token of the draft model behind the text, and how often it would be
    accepted there. The first has the text's own."""
    said = one_pass(beside(model, target), params, lesson)[0].hidden
    truth = one_pass(target.model, target.params, lesson)[0].hidden

    def one(inputs):
        draft, teacher, i = inputs
        q = jax.nn.log_softmax(shared_logits(model, params, draft, target).astype(jnp.float32))
        p = shared_logits(target.model, target.params, teacher, Target(model, params)).astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(key, i), q).astype(jnp.int32)
        at = lambda x: take_along(x, token[:, None], 1)[:, 0]
        return token, jnp.minimum(jnp.exp(at(jax.nn.log_softmax(p)) - at(q)), 1.0)

    by_place = (said[:, :-1].swapaxes(0, 1), truth[:, :-1].swapaxes(0, 1), jnp.arange(said.shape[1] - 1))
    token, accepted = (x.swapaxes(0, 1) for x in jax.lax.map(one, by_place, batch_size=POSITIONS))
    before = jnp.asarray(lesson.tokens)[:, :1]
    return jnp.concatenate([before, token], 1), jnp.pad(accepted, ((0, 0), (1, 0)))


def loss_of(head: AcceptanceHead, found: Examples, rejections: float = 6.0) -> tuple[Array, Report]:
    """(float32[], what to report: how often even odds tell what is accepted more often than not)."""
    chance = head.accepted(found.features)
    loss, share = acceptance_weighted(chance, found.accepted, rejections)
    counted = jnp.sum(found.weight)
    value = jnp.sum(found.weight * loss) / jnp.maximum(jnp.sum(found.weight * share), 1e-9)
    right = jnp.sum(found.weight * ((chance > 0.5) == (found.accepted > 0.5))) / jnp.maximum(counted, 1.0)
    return value, jax.lax.stop_gradient(Report(value[None], right[None], right[None], counted))


def calibrated(head: AcceptanceHead, rejections: float = 6.0) -> AcceptanceHead:
    """The head with its weight on rejections taken out: where it says P, w P / (w P + 1 - P)."""
    bias = head.out.bias + jnp.array([0.0, jnp.log(rejections)], head.out.bias.dtype)
    return head._replace(out=head.out._replace(bias=bias))
