"""A*-decoding: a best-first search over the steps of a text, by their rewards and an estimate of the remaining cost.

A*-Decoding: Token-Efficient Inference Scaling (2025), arXiv 2505.13672.

Rule: a node is a text. Its expansion samples k next steps, each with a reward r from 0 to 1. The cost of a child is
g = the sum of -log r over its steps. The estimate of its remaining cost is h = -log r max(0, S - depth), with the r
of its last step, and f = g + h. The node with the smallest f is expanded. At most M open nodes with the smallest f
stay, and equal children count once. The first finished node (an eos or a full row) that has the smallest f is the
text. After `budget` expansions the text is the finished node with the smallest f, or else the node with the
smallest f.
Guarantee: lossy. With k = 1 it is plain sampling, byte for byte, within the budget. With M = 1 it is a greedy search,
which takes the best of k steps.
Deviations: the paper does not define the cost. This cost is our choice, and so are k = 4, M = 64, S = 8 and 64
expansions. For a finished node h is 0, and a reward below 1e-30 counts as 1e-30. Each round expands one node per
prompt and reads its text again after the prompt.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays.indexing import take_along
from specjax.arrays.modes import with_standard_modes
from specjax.catalog import Method, Option, shared
from specjax.collaborate import multi_writer as texts
from specjax.collaborate.multi_writer import TextState
from specjax.collaborate.prepare import TextJob, above_zero, number, prepare_texts, whole
from specjax.collaborate.results import TextResult, mark_failures, result, scalars
from specjax.collaborate.rewards import Reward, as_argument, check_reward, readers_of, score_text
from specjax.collaborate.segments import Segmenter
from specjax.engine.packing import Prompts
from specjax.engine.prepare import Settings
from specjax.numerics.sampling import fold_in
from specjax.types import Array, Drafter, Target

METHOD = Method(
    name="a_star",
    kind="collaboration",
    guarantee="lossy",
    summary="searches over reasoning steps with A*, by rewards and an estimate of the remaining cost",
    paper="arXiv 2505.13672",
    needs=frozenset({"segmenter", "reward"}),
    options=(
        Option("k", "int", 4, "candidate steps per expansion"),
        Option("frontier", "int", 64, "size of the frontier"),
        Option("expected", "float", 8.0, "expected number of steps of a text; 0: no estimate of the remaining cost"),
        Option("budget", "int", 64, "expansions per prompt"),
        Option("max_step_tokens", "int", 512, "maximum number of tokens per step"),
        shared.WRITING_DRAFTER,
    ),
    words=(*shared.reward_words(), shared.steps("an empty line")),
)


READER = 1  # the writer that is the reward's model
TEMPERATURE = 1.0
"""The default sampling temperature."""
NO_REWARD = "a reward is NaN or no number from 0 to 1; look at the function of the reward"
LEAST = 1e-30
"""Lower bound of a reward, which makes all costs finite."""


class Nodes(NamedTuple):
    """The N open nodes of each prompt."""

    f: Array  # float32[B, N]; inf: no node
    g: Array  # float32[B, N]
    depth: Array  # int32[B, N], steps
    tokens: Array  # int32[B, N, L], with the prompt
    length: Array  # int32[B, N]
    ended: Array  # bool[B, N], True: the last token is an eos
    finished: Array  # bool[B, N], True: the text is complete


class Search(NamedTuple):
    """The cost and the outcome of a search."""

    expansions: Array  # int32[B]
    tokens: Array  # int32[B], tokens of all sampled steps
    cost: Array  # float32[B], g of the text
    finished: Array  # bool[B], True: the text is complete; False: the budget was spent
    valid: Array  # bool[B], True: all rewards were numbers from 0 to 1

    def summary(self, row: int) -> dict[str, Any]:
        """Return the expansions of a row, the tokens of its steps, the cost of its text and whether it is complete."""
        return scalars(self, row, ("expansions", "tokens", "cost", "finished"))


def a_star(
    target: Target,
    prompts: Prompts,
    *,
    key: Array | int,
    max_new_tokens: int,
    segmenter: Segmenter,
    reward: Reward,
    k: int = 4,
    frontier: int = 64,
    expected: float = 8.0,
    budget: int = 64,
    max_step_tokens: int = 512,
    temperature: float = TEMPERATURE,
    drafter: Drafter | None = None,
    **settings: Any,
) -> TextResult:
    """Decode the best text of a best-first search over steps.

    Args:
      segmenter: detects the ends of steps, such as `after_strings(["\\n\\n"], ...)`.
      max_step_tokens: maximum number of tokens per step.
      reward: r of a step, from 0 to 1, a function or a model of `reward_of`. Pass the same function in every call to
        avoid compiling again.
      k: steps per expansion. frontier: maximum number of open nodes, M. budget: expansions per prompt.
      expected: S, the expected number of steps of a text; 0 ranks nodes by their cost alone.
      temperature: sampling temperature of the steps. drafter: drafts for all steps.
      settings: settings of `decode`: eos, top_p, processors, ...

    Returns: TextResult with the passes and tokens read of all steps; its log is a `Search`.
    Raises: UsageError for a setting outside its range, or a reward that is no number from 0 to 1.
    """
    checked = check_options(
        reward=reward, k=k, frontier=frontier, expected=expected, budget=budget, max_step_tokens=max_step_tokens,
        temperature=temperature, **settings,
    )  # fmt: skip
    job = prepare_texts(
        (target,), prompts, key=key, max_new_tokens=max_new_tokens, method=METHOD.name, drafters=(drafter,),
        settings=checked,
        readers=readers_of(reward),
    )  # fmt: skip
    numbers = jnp.array([budget, max_step_tokens], jnp.int32)
    done = _run(job, segmenter, numbers, jnp.float32(expected), as_argument(reward), k=k, frontier=frontier)
    return mark_failures(done, {NO_REWARD: ~done.log.valid}).cut(max_new_tokens)


def check_options(
    *, reward: Any, k: int, frontier: int, expected: float, budget: int, max_step_tokens: int,
    temperature: float = TEMPERATURE, **settings: Any,
) -> Settings:  # fmt: skip
    """Check the options, and return the settings of the steps. Raises: UsageError."""
    check_reward("reward", reward)
    for name, value in (("k", k), ("frontier", frontier), ("budget", budget), ("max_step_tokens", max_step_tokens)):
        whole(name, value, 1)
    number("expected", expected, 0 <= expected < float("inf"), "at least 0, and finite")
    if k > 1:
        above_zero(temperature, "steps drawn at 0 are equal; or give k=1")
    return Settings(temperature=temperature, **settings)


def costs(g: Array, reward: Array, depth: Array, finished: Array, expected: Array | float) -> tuple[Array, Array]:
    """Return (f, g) float32 of children, from the g of their parent, the reward of their step and their depth."""
    step = -jnp.log(jnp.maximum(reward, LEAST))
    g = g + step
    return g + jnp.where(finished, 0.0, step * jnp.maximum(expected - depth, 0)), g


def pick(nodes: Nodes, place: Array) -> Nodes:
    """Return the nodes at `place` int32[B, K]."""
    index = lambda x: place.reshape(*place.shape, *[1] * (x.ndim - 2))
    return Nodes(*(take_along(x, index(x), 1) for x in nodes))


def keep_best(nodes: Nodes, count: int) -> Nodes:
    """Return the `count` nodes with the smallest f, in this order. Of equal nodes the earlier comes first."""
    return pick(nodes, jax.lax.top_k(-nodes.f, count)[1])


def distinct(tokens: Array, length: Array, start: Array) -> Array:
    """Return bool[B, K], True for texts int32[B, K, L] that equal no earlier one after `start` int32[B]."""
    place = jnp.arange(tokens.shape[2])
    inside = (place >= start[:, None, None]) & (place < length[:, :, None])
    new = jnp.where(inside, tokens, -1)
    equal = jnp.all(new[:, :, None] == new[:, None], 3)
    return ~jnp.any(equal & jnp.tril(jnp.ones(equal.shape[1:], bool), -1), 2)


@functools.partial(jax.jit, static_argnames=("k", "frontier"))
@with_standard_modes
def _run(
    job: TextJob, segmenter: Segmenter, numbers: Array, expected: Array, reward: Reward, *, k: int, frontier: int
) -> TextResult:
    writers, many, (budget, max_step_tokens) = job.writers, texts.forked(job.writers, k), numbers
    batch = len(job.lengths)

    def restore(text: TextState, node: Nodes) -> TextState:
        """Return the text of one node per row."""
        text = texts.rewind(writers, text, text.prompt)
        new = take_along(node.tokens[:, 0], jnp.minimum(text.prompt[:, None] + index, len(index) - 1), 1)
        return texts.append(text, new, node.length[:, 0] - text.prompt, 0)

    def body(carry: tuple[TextState, Nodes, Search]) -> tuple[TextState, Nodes, Search]:
        text, nodes, log = carry
        node = pick(nodes, jnp.zeros((batch, 1), jnp.int32))
        expands = goes_on(nodes, log)
        text = texts.read(writers, restore(text, node), 0, expands)
        if len(writers) > READER:
            text = texts.read(writers, text, READER, expands)
        if k > 1:  # children of different nodes need different draws at a position
            text = text._replace(keys=fold_in(job_keys, log.expansions[:, None]))
        steps, written = texts.extend(
            many,
            texts.fork(writers, text, k),
            0,
            segmenter=segmenter,
            limit=max_step_tokens,
            active=jnp.repeat(expands, k),
        )
        steps, scores = score_text(reward, many, steps, written.start, jnp.repeat(expands, k), READER)
        r = scores.astype(jnp.float32).reshape(batch, k)
        grouped = lambda x: x.reshape(batch, k, *x.shape[1:])
        finished, depth = grouped(~steps.unfinished), jnp.broadcast_to(node.depth + 1, (batch, k))
        f, g = costs(node.g, r, depth, finished, expected)
        new = distinct(grouped(steps.tokens), grouped(steps.length), grouped(written.start)[:, 0])
        children = Nodes(
            jnp.where(new, f, jnp.inf), g, depth, grouped(steps.tokens), grouped(steps.length), grouped(steps.ended),
            finished,
        )  # fmt: skip
        remaining = nodes._replace(f=nodes.f.at[:, 0].set(jnp.inf))
        both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), remaining, children)
        where = lambda x, y: jnp.where(expands.reshape(-1, *[1] * (x.ndim - 1)), x, y)
        nodes = jax.tree.map(where, keep_best(both, frontier), nodes)
        valid = ~expands | jnp.all((r >= 0) & (r <= 1), 1)
        spent = lambda x, previous: previous + jnp.sum(grouped(x) - previous[:, None], 1)
        text = text._replace(
            passes=spent(steps.passes, text.passes), read=spent(steps.read, text.read),
            finite=text.finite & jnp.all(grouped(steps.finite), 1),
        )  # fmt: skip
        count = jnp.sum(grouped(steps.length - written.start), 1)
        log = log._replace(expansions=log.expansions + expands, tokens=log.tokens + count, valid=log.valid & valid)
        return text, nodes, log

    def goes_on(nodes: Nodes, log: Search) -> Array:
        return ~nodes.finished[:, 0] & (log.expansions < budget) & log.valid

    text = job.begin()
    index, job_keys = jnp.arange(text.tokens.shape[1]), text.keys
    zero, none = jnp.zeros((batch, frontier)), jnp.zeros((batch, frontier), bool)
    first = zero.at[:, 1:].set(jnp.inf)
    whole_number = zero.astype(jnp.int32)
    nodes = Nodes(
        first, zero, whole_number, jnp.repeat(text.tokens[:, None], frontier, 1), whole_number + text.length[:, None],
        none, none,
    )  # fmt: skip
    log = Search(whole_number[:, 0], whole_number[:, 0], zero[:, 0], none[:, 0], ~none[:, 0])
    carry = text, nodes, log
    text, nodes, log = jax.lax.while_loop(lambda carry: jnp.any(goes_on(*carry[1:])), body, carry)
    # If the budget was spent, finished nodes come before unfinished ones.
    best = jnp.argmin(jnp.where(nodes.finished, nodes.f, jnp.inf), 1)  # 0, the smallest f, if no node is finished
    node = pick(nodes, best[:, None])
    text = restore(text, node)._replace(ended=node.ended[:, 0])
    return result(text, log._replace(cost=node.g[:, 0], finished=node.finished[:, 0]), 0)
