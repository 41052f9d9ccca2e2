"""Rewards of texts: functions of the caller, and reward models that read the text with a cache.

A reward model is a language model whose output layer is replaced by a scalar head. With h the hidden state after the
final norm, at the end of the text and of the model's `suffix`, the score is

    link(w . g(h) + b),  link = sigmoid, exp or the identity

where g is the identity, or the hidden layers of a head with some.

A process reward model scores the text after each step, and an outcome reward model after the last one. Both are the
same function here, because a method chooses the place. A classifier with two labels is such a model too: the softmax of
its second label is the sigmoid of the difference of its logits.

In the loops of `specjax.collaborate` a reward model is one more reader of the text. Its cache follows every rewind and
every copy of a row, so each token is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.adaptive.optimise import one_pass
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState, Writers
from specjax.errors import UsageError
from specjax.models import loading
from specjax.models.loading.decision_heads import read_judge, to_log_odds
from specjax.models.loading.reward_models import RewardHead, is_reward_folder
from specjax.numerics.validation import check_range
from specjax.types import STATIC, Array, Target

Reward = Callable[[Array, Array, Array, Array], Array]
"""`reward(tokens int32[R, L], start int32[R], length int32[R], ended bool[R]) -> float32[R]`. It scores the block from
`start` to `length`, given the text before it. `ended` is True if the text is complete. The function is traced; wrap
Python code in `jax.pure_callback`. A `RewardModel` is such a function, and so is any callable pytree, whose arrays then
are arguments of the program.
"""

Link = Literal["sigmoid", "exp", "identity"]
LINKS: dict[str, Callable[[Array], Array]] = {"sigmoid": jax.nn.sigmoid, "exp": jnp.exp, "identity": lambda x: x}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RewardModel:
    """A model with a scalar head, which scores texts. It is a pytree and a `Reward`."""

    target: Target
    weight: Array  # float32[D]
    bias: Array  # float32[]
    suffix: Array  # int32[S], tokens that the model reads after the text, before it scores
    layers: tuple[tuple[Array, Array], ...] = ()  # (float32[out, in], float32[out]) of each hidden layer, with ReLU
    link: str = field(metadata=STATIC, default="sigmoid")

    def __call__(self, tokens: Array, start: Array, length: Array, ended: Array) -> Array:
        """Return the scores float32[R] of texts `tokens` int32[R, L] of `length` int32[R] tokens, in one pass.

        A text with a token outside of the model's vocabulary has the score NaN. `start` and `ended` change nothing.

        Raises: UsageError for a text that the model has no room for, or an empty one without a suffix.
        """
        first, last = int(not len(self.suffix)), self.target.model.max_positions - len(self.suffix)
        words = f"from {first} to {last} tokens, those that {self.target.model.name} can read"
        check_range("length", length, lambda x: (x >= first) & (x <= last), words)
        return _score_in_one_pass(self, jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32))

    def of_hidden(self, hidden: Array) -> Array:
        """Return the scores float32[R] of hidden states [R, D]."""
        x = hidden.astype(jnp.float32)
        for weight, bias in self.layers:
            x = jax.nn.relu(x @ weight.T + bias)
        return LINKS[self.link](x @ self.weight + self.bias)

    def can_read(self, tokens: Array, length: Array) -> Array:
        """Return bool[R], True for texts whose tokens are all in the model's vocabulary."""
        inside = jnp.arange(tokens.shape[1]) < length[:, None]
        return ~jnp.any(inside & (tokens >= self.target.model.vocab_size), 1)


def reward_of(model: Target, head: Any, *, link: Link = "sigmoid", suffix: Sequence[int] = ()) -> RewardModel:
    """Return the reward model of a loaded model and a scalar head.

    Args:
      model: any model of `specjax.load`. It reads the same tokens as the models that write.
      head: (weight, bias): float32[D] and a number, such as the result of `training.fit_judge`. One row [1, D], or two
        rows [2, D] of a classifier whose second label means right, are accepted too. A `RewardHead` may have hidden
        layers.
      link: "sigmoid" for a probability, "exp" for a weight of `reward_smc`, "identity" for the number itself.
      suffix: ids that the model reads after a step before it scores, such as the step token of its training.

    Raises: UsageError for a head of another width than the model, or ids outside of its vocabulary.
    """
    if link not in get_args(Link):
        raise UsageError(f'link must be one of {", ".join(get_args(Link))}, not "{link}"')
    weight, bias = to_log_odds(np.asarray(head[0], np.float32), np.asarray(head[1], np.float32), "the head")
    layers = head.layers if isinstance(head, RewardHead) else ()
    if not np.isfinite([*weight, bias]).all():
        raise UsageError("the head has values that are not finite; train it again")
    width = _width(model)
    for first in [layer for layer, _ in layers] + [weight[None]]:
        if first.shape[1] != width:
            raise UsageError(f"the head reads {first.shape[1]} numbers, and the model has a width of {width}")
        width = len(first)
    outside = [token for token in suffix if not 0 <= token < model.model.vocab_size]
    if outside:
        raise UsageError(f"suffix has {outside[0]}, which is not one of the model's {model.model.vocab_size} tokens")
    ids = jnp.asarray(np.array(suffix, np.int32).reshape(-1))
    hidden = tuple((jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in layers)
    return RewardModel(model, jnp.asarray(weight), jnp.float32(bias), ids, hidden, link)


def load_reward(
    source: str | Path, head: str | Path | None = None, *, link: Link = "sigmoid", suffix: str | None = None,
    **options: Any,
) -> tuple[RewardModel, Any]:  # fmt: skip
    """Load a reward model, and its tokenizer.

    Args:
      source: a folder or hub id of a classifier with one or two labels (`LlamaForSequenceClassification`,
        `Qwen2ForTokenClassification`, a value head of TRL or of Skywork's process reward models), or with `head` any
        model that `specjax.load` accepts.
      head: a file of the head, as `models.loading.decision_heads.save_judge` writes it; None: the head of `source`.
      link: as in `reward_of`. suffix: text that the model reads after a step before it scores.
      options: those of `specjax.load`, such as dtype and max_positions.

    Raises: UsageError for a model without a head, or whose head has more than two labels.
    """
    has_own = head is None or is_reward_folder(loading.resolve(source))
    loaded = loading.read_model(source, kind="reward" if has_own else "autoregressive", **options)
    scalar = loaded.head if head is None else read_judge(head)
    ids = () if suffix is None else tuple(loaded.tokenizer.encode(suffix, special=False))
    return reward_of(loaded.target, scalar, link=link, suffix=ids), loaded.tokenizer


def _width(model: Target) -> int:
    """Return D, the width of the model's hidden states."""

    def hidden(params: Any) -> Array:
        cache = model.model.init_cache(params, None, 1, 0)
        return one_pass(model.model, params, jnp.zeros((1, 1), jnp.int32), cache)[0].hidden

    return jax.eval_shape(hidden, model.params).shape[-1]


@jax.jit
@with_standard_modes
def _score_in_one_pass(reward: RewardModel, tokens: Array, length: Array) -> Array:
    target, count, size = reward.target, len(reward.suffix), tokens.shape[1] + len(reward.suffix)
    index = jnp.arange(size)
    place = index - length[:, None]  # index in the suffix
    padded = jnp.pad(tokens, ((0, 0), (0, count)))
    if count:
        is_suffix = (place >= 0) & (place < count)
        padded = jnp.where(is_suffix, reward.suffix[jnp.clip(place, 0, count - 1)], padded)
    inside = jnp.where(place < count, padded, 0)
    cache = target.model.init_cache(target.params, None, len(tokens), 0)
    output, _ = one_pass(target.model, target.params, inside, cache)
    last = take_along(output.hidden, (length + count - 1)[:, None, None], 1)[:, 0]
    return jnp.where(reward.can_read(tokens, length), reward.of_hidden(last), jnp.nan)


# --- in the loops of several models -----------------------------------------------------------------------------------


def as_argument(reward: Reward | None) -> Reward | None:
    """Return a reward as a pytree, an argument of a compiled program. The same function compiles once."""
    is_leaf = jax.tree_util.all_leaves([reward])
    return jax.tree_util.Partial(reward) if is_leaf and reward is not None else reward


def check_reward(name: str, reward: Any) -> None:
    """Raise UsageError if a method has no reward."""
    if reward is None:
        raise UsageError(f"{name} is needed, a model of collaborate.reward_of or a function of texts")


def readers_of(*rewards: Reward | None) -> tuple[Target, ...]:
    """Return the models that read the text for these rewards, in their order: the `readers` of `prepare_texts`."""
    return tuple(reward.target for reward in rewards if isinstance(reward, RewardModel))


def score_text(
    reward: Reward, writers: Writers, text: TextState, start: Array, active: Array, reader: int
) -> tuple[TextState, Array]:
    """Return the text, and the reward float32[R] of its blocks from `start` int32[R] on.

    reader: the index of the reward's model among the writers, if it has one. Scores of rows that are not `active` are
    undefined.
    """
    if not isinstance(reward, RewardModel):
        score = reward(text.tokens, start, text.length, ~text.unfinished)
        if jnp.shape(score) != text.length.shape:
            raise UsageError(f"a reward must return one number per row, {text.length.shape}, not {jnp.shape(score)}")
        return text, score
    text, hidden = texts.hidden_after(writers, text, reader, reward.suffix, active)
    return text, jnp.where(reward.can_read(text.tokens, text.length), reward.of_hidden(hidden), jnp.nan)
