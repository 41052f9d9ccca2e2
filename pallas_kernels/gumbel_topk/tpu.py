"""Gumbel top-k in one pass over the vocabulary: a Mosaic kernel whose noise never leaves the registers.

The vocabulary goes by, eight rows on the sublanes. Each of the 128 lanes keeps the best few tokens that passed through
it, sorted by compare-exchange: no branch and no reduction across lanes. The best k of a row are then taken from what
its lanes kept. If all that a lane kept is among them it may have dropped another: the kernel runs again with k tokens
per lane, which is always enough. `_slots` makes that rare; a second run takes four times the first.

Why: XLA fuses the noise into its own TopK, so it does not materialise it either, but then makes k passes over the
vocabulary. Instruction bundles of the compiler's final schedule times the trips of their loops (libtpu 0.0.42, v5e,
float32, V = 262144, k = 64; waiting for reductions across lanes is in neither):

    rows   this kernel   noise + lax.top_k
       8        97,000             640,000
      64       777,000           5,100,000

Of 369 bundles per 8 x 1024 tokens the noise takes about 280: 110 operations of Threefry, four a bundle, and logarithms.
13 are for the bits that `jax.random.gumbel` leaves out, 9 to 12 on v5p, v6e and tpu7x. bfloat16 takes as many.
XLA's program takes half a minute to compile, this one two seconds.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.arrays.x64 import without_x64
from specjax.pallas_kernels.gumbel_topk.reference import gumbel, masked
from specjax.pallas_kernels.tuning import tuned

SUBLANES, LANES = 8, 128
MOST = 64  # the largest k
GROUP = 8  # slots that one trip of the slots' loop goes through
FOLDED = 32  # below this many rows, none of the sublanes is left idle
RARE = 1e-4  # chance per row that the kernel runs a second time


def unsupported(keys, logits, k: int) -> str | None:
    """Why the kernel cannot take these arguments, or None. A flag of jax that is gone has its default."""
    if k > MOST:
        return f"takes k up to {MOST}, not {k}"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16 logits, not {logits.dtype}"
    if keys is not None and not getattr(jax.config, "jax_threefry_partitionable", True):
        return "needs jax_threefry_partitionable"
    return None


@without_x64  # as Mosaic's indices are
def gumbel_topk(
    keys, logits, k, *, temperature=None, valid=None, first_id=0, block=None, width=None, slots=None, device_kind=None,
    interpret=False,
):  # fmt: skip
    """See `gumbel_topk` in the package.

    `valid` is applied by XLA, which fuses it into whatever computes the logits.

    Args:
      block: tokens per step of the grid; width: tokens per trip of its inner loop, a multiple of 128 that divides
        `block`. None: tuned.json, for `device_kind` if it is there.
      slots: tokens that each lane keeps at first. None: as few as make a second run rare.
      interpret: run on any backend, for tests: True or `pltpu.InterpretParams`.
    """
    sizes = tuned("gumbel_topk", device_kind)
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    flat = math.prod(rows)
    words = jnp.zeros((flat, 2), jnp.uint32) if keys is None else jax.random.key_data(keys).reshape(flat, 2)
    first = jnp.broadcast_to(jnp.asarray(first_id, jnp.uint32), (flat, 1))
    words = jnp.concatenate([words, first], 1)  # what the noise of a token depends on, besides its place in the row
    heat = jnp.broadcast_to(jnp.asarray(1.0 if temperature is None else temperature, jnp.float32), rows)
    ids, scores = _search(
        words, heat.reshape(flat, 1), masked(logits, valid).reshape(flat, vocab), k=k, noisy=keys is not None,
        heated=temperature is not None, block=block or sizes["block"], width=width or sizes["width"], slots=slots,
        interpret=interpret,
    )  # fmt: skip
    return ids.reshape(*rows, k) + first_id, scores.reshape(*rows, k)


@functools.partial(
    jax.jit, static_argnames=("k", "noisy", "heated", "block", "width", "slots", "interpret"), inline=True
)
def _search(words, heat, logits, *, k, noisy, heated, block, width, slots, interpret):
    """words uint32[R, 3], heat float32[R, 1], logits [R, V] -> ids int32[R, k], scores float32[R, k]."""
    rows = logits.shape[0]
    fold = SUBLANES // math.gcd(rows, SUBLANES) if rows < FOLDED else 1
    logits, block, width = _fold(logits, fold, block, width)
    words, heat = (jnp.repeat(x, fold, 0) for x in (words, heat))
    enough = min(k, pl.cdiv(logits.shape[1], LANES))  # no lane can have more of the best k
    most = _whole_groups(enough)
    first = min(_whole_groups(slots or _slots(k)), most)

    def run(slots):
        ids, scores, drained = _best(
            words, heat, logits, k=k, slots=slots, block=block, width=width, fold=fold, noisy=noisy, heated=heated,
            interpret=interpret,
        )  # fmt: skip
        if fold > 1:
            scores, ids = jax.lax.sort((-scores.reshape(rows, -1), ids.reshape(rows, -1)), num_keys=2)
            scores, ids = -scores[:, :k], ids[:, :k]
        return ids, scores, jnp.any(drained)

    ids, scores, drained = run(first)
    if first == most:
        return ids, scores
    return jax.lax.cond(drained, lambda: run(most)[:2], lambda: (ids, scores))


def _slots(k: int) -> int:
    """The fewest slots of which a lane rarely gives all to the best k; k itself if it is small.

    By the union bound, for tokens that fall on lanes at random, as they do with their ids modulo 128.
    """
    if k <= GROUP:
        return k
    return next(n for n in range(1, GROUP + 1) if n == GROUP or math.comb(k, n) / LANES ** (n - 1) < RARE)


def _whole_groups(slots: int) -> int:
    return slots if slots <= GROUP else pl.cdiv(slots, GROUP) * GROUP


def _fold(logits, fold: int, block: int, width: int):
    """Rows of `logits` [R, V] cut into `fold` rows each: [R * fold, columns], and the block and width that fit it.

    Eight rows lie on the sublanes; fewer would leave some idle. The copy is small beside that.
    """
    rows, vocab = logits.shape
    if width % LANES or block % width:
        raise ValueError(f"width must be a multiple of {LANES} and divide block, not {width} and {block}")
    columns = pl.cdiv(vocab, fold)
    width = min(width, pl.cdiv(columns, LANES) * LANES)
    if fold == 1 and columns >= block:
        return logits, block, width
    columns = pl.cdiv(columns, width) * width
    logits = jnp.pad(logits, ((0, 0), (0, fold * columns - vocab)), constant_values=-jnp.inf)
    return logits.reshape(rows * fold, columns), min(block, columns), width


def _best(words, heat, logits, *, k, slots, block, width, fold, noisy, heated, interpret):
    """The best k of what the lanes of each row keep, and which lanes gave all they had.

    Returns: ids int32[rows, k], scores float32[rows, k], drained bool[rows, 128].
    """
    rows, columns = logits.shape
    body = functools.partial(
        _kernel, k=k, slots=slots, block=block, width=width, columns=columns, fold=fold, noisy=noisy, heated=heated
    )
    per_row = lambda size: pl.BlockSpec((SUBLANES, size), lambda row, step: (row, 0))
    inputs = words, heat, logits
    total = lambda *inputs: sum(jnp.sum(x.astype(jnp.float32)) for x in inputs)
    # Asked of jax, for the shape says which mesh axes of a `shard_map` the values vary over.
    out = lambda dtype: jax.eval_shape(lambda *x: jnp.full((rows, LANES), total(*x)).astype(dtype), *inputs)
    ids, scores, drained = pl.pallas_call(
        body,
        grid=(pl.cdiv(rows, SUBLANES), pl.cdiv(columns, block)),
        in_specs=[per_row(3), per_row(1), pl.BlockSpec((SUBLANES, block), lambda row, step: (row, step))],
        out_specs=[per_row(LANES)] * 3,
        out_shape=[out(jnp.int32), out(jnp.float32), out(jnp.int32)],
        scratch_shapes=[pltpu.VMEM((SUBLANES, slots * LANES), dtype) for dtype in (jnp.float32, jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=(130 * noisy + 5 * slots) * rows * columns,
            transcendentals=2 * noisy * rows * columns,
            bytes_accessed=rows * columns * logits.dtype.itemsize,
        ),
        interpret=interpret,
        name="gumbel_topk",
    )(*inputs)
    return ids[:, :k], scores[:, :k], drained > 0


def _kernel(
    words, heat, logits, out_ids, out_scores, drained, scores, ids, *, k, slots, block, width, columns, fold, noisy,
    heated,
):  # fmt: skip
    """Pass a block [8, block] of eight rows by the slots [8, slots * 128] of their lanes; after the last, choose.

    Lanes beyond the row hold anything, NaN too: they are -inf before they are compared. Rows beyond the last one cost
    time alone: no row looks at another, and no branch looks at a score.
    """
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        scores[...] = jnp.full(scores.shape, -jnp.inf, jnp.float32)
        ids[...] = jnp.zeros(ids.shape, jnp.int32)

    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 1)
    row = pl.program_id(0) * SUBLANES + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0)
    offset = jax.lax.rem(row, fold) * columns  # of the part of the vocabulary that this row is

    def pass_by(trip, _):
        start = pl.multiple_of(trip * width, width)
        column = step * block + start + lane
        score = logits[:, pl.ds(start, width)].astype(jnp.float32)
        if heated:
            score = score / heat[...]
        if noisy:
            score = score + gumbel(words[:, 0:1], words[:, 1:2], column + offset + words[:, 2:3].astype(jnp.int32))
        if columns % width:
            score = jnp.where(column < columns, score, -jnp.inf)
        cut = lambda x: tuple(x[:, at : at + LANES] for at in range(0, width, LANES))
        _insert(scores, ids, slots, cut(score), cut(column + offset))
        return 0

    left = jnp.minimum(block, columns - step * block)
    jax.lax.fori_loop(0, jax.lax.div(left + width - 1, width), pass_by, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        out_ids[...], out_scores[...], drained[...] = _choose(scores, ids, k, slots)


def _insert(scores, ids, slots: int, new, tokens):
    """Insert candidates (tuples of [8, 128], ids ascending) into the slots, which are sorted, the best first.

    A candidate goes before the slots that it beats, and these move down by one. Equal ones stay before it: they have
    lower ids.
    """

    def through(slot, moving):
        score, token = map(list, moving)  # what goes into the slot if the candidate beats it
        kept, where = scores[:, _at(slot)], ids[:, _at(slot)]
        for i, candidate in enumerate(new):
            beaten = candidate > kept
            kept, score[i] = jnp.where(beaten, score[i], kept), jnp.where(beaten, kept, score[i])
            where, token[i] = jnp.where(beaten, token[i], where), jnp.where(beaten, where, token[i])
        scores[:, _at(slot)], ids[:, _at(slot)] = kept, where
        return tuple(score), tuple(token)

    _each_slot(slots, through, (new, tokens))


def _choose(scores, ids, k: int, slots: int):
    """Take the best of the lanes' first slots k times, of equal ones the lowest id; its lane moves up.

    Returns: ids int32[8, 128] and scores float32[8, 128], of which the first k count, and int32[8, 128], whether the
    lane's last slot was taken.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    empty = jnp.full((SUBLANES, LANES), -jnp.inf, jnp.float32), jnp.zeros((SUBLANES, LANES), jnp.int32)

    def take(rank, carry):
        out_ids, out_scores, taken = carry
        first, where = scores[:, _at(0)], ids[:, _at(0)]
        best = jnp.max(first, 1, keepdims=True)
        lowest = jnp.min(jnp.where(first == best, where, jnp.iinfo(jnp.int32).max), 1, keepdims=True)
        chosen = (first == best) & (where == lowest) & (best > -jnp.inf)

        def move_up(index, below):
            """From the last slot to the first; `below` is what the slot under this one held."""
            at = _at(slots - 1 - index)
            own = scores[:, at], ids[:, at]
            scores[:, at], ids[:, at] = (jnp.where(chosen, new, old) for new, old in zip(below, own, strict=True))
            return own

        _each_slot(slots, move_up, empty)
        here = lane == rank
        return jnp.where(here, lowest, out_ids), jnp.where(here, best, out_scores), taken + chosen.astype(jnp.int32)

    none = jnp.zeros((SUBLANES, LANES), jnp.int32)
    out_ids, out_scores, taken = jax.lax.fori_loop(0, k, take, (none, none.astype(jnp.float32), none))
    return out_ids, out_scores, (taken == slots).astype(jnp.int32)


def _at(slot):
    return pl.ds(pl.multiple_of(slot * LANES, LANES), LANES)


def _each_slot(slots: int, body, carry):
    """`fori_loop` over the slots: unrolled for a few, else by groups."""
    group = min(slots, GROUP)
    if slots == group:
        return jax.lax.fori_loop(0, slots, body, carry, unroll=True)
    through_group = lambda i, carry: jax.lax.fori_loop(
        0, group, lambda n, carry: body(i * group + n, carry), carry, unroll=True
    )
    return jax.lax.fori_loop(0, slots // group, through_group, carry)
