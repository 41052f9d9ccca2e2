"""Training of SpecDec++'s stopping head, which predicts the acceptance of draft tokens (`models.heads.acceptance`).

Huang, Guo, Wang: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (2024), arXiv 2405.19715.
For a text X of the target, the draft model proposes Y_i ~ q(. | X_<i), which is accepted with probability
a_i = min(1, p(Y_i) / q(Y_i)). The draft model then reads Z, where Z_i is X_i with probability r = 0.15, else Y_i. From
its features at Y_i the head predicts the acceptance s_i:

    minimise sum of (w (1 - a_i) (-log(1 - s_i)) + a_i (-log s_i)) / sum of (w (1 - a_i) + a_i), w = 6

over the positions with Z_i = Y_i. As in the paper, a_i is computed after X_<i, while the head reads features after
Z_<i. The draft model is frozen and has no optimizer state.
Guarantee: decoding stays as exact as before, for any output of the head.
Deviations: prompts are not mixed. Both distributions have temperature 1. The learning rate is our own.

    head = train(target, init_stopping(draft), texts, recipe=recipe_of("specdec++")).head
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.models.heads.acceptance import AcceptanceHead, init_acceptance
from specjax.models.vocabulary import match_vocabulary
from specjax.numerics.validation import check_integer
from specjax.training.data.packing import PackedBatch
from specjax.training.objectives.draft_models import LOGIT_POSITIONS, shared_logits
from specjax.training.objectives.head_objective import StepReport
from specjax.training.objectives.losses import acceptance_weighted
from specjax.training.objectives.unroll import forward_packed
from specjax.types import STATIC, Array, Model, PyTree, Target


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoppingTrainable:
    """A stopping head that `train` accepts, with the draft model whose tokens it judges."""

    model: Model = field(metadata=STATIC)
    params: PyTree  # {"draft": parameters of the model, "head": AcceptanceHead}
    rejection_weight: float = field(metadata=STATIC, default=6.0)  # w
    text_share: float = field(metadata=STATIC, default=0.15)  # r

    @property
    def head(self) -> AcceptanceHead:
        """Return the head with its parameters."""
        return self.params["head"]


@with_standard_modes
def init_stopping(draft: Target, num_blocks: int = 3, **settings: float) -> StoppingTrainable:
    """Return an untrained head for a draft model. Args: settings: fields of `StoppingTrainable`."""
    check_integer("num_blocks", num_blocks, 0)
    zero = np.zeros((1, 1), np.int32)
    packed = PackedBatch(jnp.asarray(zero), jnp.asarray(zero), jnp.asarray(zero > 0))
    output = jax.eval_shape(lambda params: forward_packed(draft.model, params, packed)[0], draft.params)
    head = init_acceptance(output.hidden.shape[-1], num_blocks)
    return StoppingTrainable(draft.model, {"draft": draft.params, "head": head}, **settings)


class StoppingExamples(NamedTuple):
    """Inputs, labels and weights of a stopping head."""

    features: Array  # [B, T, D], features of the draft model at each token of Z
    accepted: Array  # float32[B, T], acceptance probability of the token
    weight: Array  # float32[B, T], 1 where the draft model proposed the token


def make_examples(
    model: Model, params: PyTree, target: Target, packed: PackedBatch, key: Array, text_share: float = 0.15
) -> StoppingExamples:
    """Compute examples with two passes of the draft model and one of the target, without gradients."""
    tokens, text_start, loss_mask = (jnp.asarray(x) for x in packed[:3])
    mix_key, sample_key = jax.random.split(key)
    proposed, accepted = sample_proposals(model, params, target, packed, sample_key)
    is_response = loss_mask & (jnp.arange(tokens.shape[1]) > text_start)
    is_proposed = is_response & (jax.random.uniform(mix_key, tokens.shape) >= text_share)
    mixed = packed._replace(tokens=jnp.where(is_proposed, proposed, tokens))
    features = forward_packed(match_vocabulary(model, target), params, mixed)[0].hidden
    return jax.lax.stop_gradient(StoppingExamples(features, accepted, is_proposed.astype(jnp.float32)))


def sample_proposals(
    model: Model, params: PyTree, target: Target, packed: PackedBatch, key: Array
) -> tuple[Array, Array]:
    """Sample a draft token for each column from the text before it.

    Returns: (int32[B, T] tokens, float32[B, T] acceptance probabilities). The first column has the text's token.
    """
    draft_hidden = forward_packed(match_vocabulary(model, target), params, packed)[0].hidden
    target_hidden = forward_packed(target.model, target.params, packed)[0].hidden

    def sample(inputs):
        draft, teacher, i = inputs
        q = jax.nn.log_softmax(shared_logits(model, params, draft, target).astype(jnp.float32))
        p = shared_logits(target.model, target.params, teacher, Target(model, params)).astype(jnp.float32)
        token = jax.random.categorical(jax.random.fold_in(key, i), q).astype(jnp.int32)
        at = lambda x: take_along(x, token[:, None], 1)[:, 0]
        return token, jnp.minimum(jnp.exp(at(jax.nn.log_softmax(p)) - at(q)), 1.0)

    columns = jnp.arange(draft_hidden.shape[1] - 1)
    by_column = (draft_hidden[:, :-1].swapaxes(0, 1), target_hidden[:, :-1].swapaxes(0, 1), columns)
    token, accepted = (x.swapaxes(0, 1) for x in jax.lax.map(sample, by_column, batch_size=LOGIT_POSITIONS))
    first = jnp.asarray(packed.tokens)[:, :1]
    return jnp.concatenate([first, token], 1), jnp.pad(accepted, ((0, 0), (1, 0)))


class StoppingSums(NamedTuple):
    """Sums over proposed tokens, float32[] each."""

    loss: Array
    share: Array  # weights of the loss
    hits: Array  # tokens whose predicted and actual acceptance are on the same side of 1/2
    tokens: Array  # number of proposed tokens


def sum_losses(head: AcceptanceHead, examples: StoppingExamples, rejection_weight: float = 6.0) -> StoppingSums:
    """Return the sums of the losses over some examples."""
    predicted = head.acceptance(examples.features)
    loss, share = acceptance_weighted(predicted, examples.accepted, rejection_weight)
    hits = (predicted > 0.5) == (examples.accepted > 0.5)
    total = lambda x: jnp.sum(examples.weight * x)
    return StoppingSums(total(loss), total(share), total(hits), jnp.sum(examples.weight))


def compute_loss(total: StoppingSums) -> tuple[Array, StepReport]:
    """Return (float32[], statistics) from the sums of a whole step."""
    value, accuracy = total.loss / jnp.maximum(total.share, 1e-9), total.hits / jnp.maximum(total.tokens, 1.0)
    return value, jax.lax.stop_gradient(StepReport(value[None], accuracy[None], accuracy[None], total.tokens))


def calibrate(head: AcceptanceHead, rejection_weight: float = 6.0) -> AcceptanceHead:
    """Remove the effect of the rejection weight w from a head: its output P becomes w P / (w P + 1 - P)."""
    bias = head.out.bias + jnp.array([0.0, jnp.log(rejection_weight)], head.out.bias.dtype)
    return head._replace(out=head.out._replace(bias=bias))
