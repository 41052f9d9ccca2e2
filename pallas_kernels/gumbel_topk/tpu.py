"""Gumbel top-k in one pass over the vocabulary: a Mosaic kernel that keeps the noise in registers.

The kernel streams the vocabulary, with eight rows on the sublanes. Each of the 128 lanes keeps the best few tokens that
passed through it, sorted by compare-exchange without branches or reductions across lanes. The best k of a row are then
selected from its lanes. If they contain all tokens of a lane, that lane may have dropped another one. Then the kernel
runs again with k tokens per lane, which is always enough. `_slots` makes that rare; a second run takes four times the
time of the first.

Motivation: XLA fuses the noise into its own TopK, so it does not materialise it either, but makes k passes over the
vocabulary. Instruction bundles of the compiler's final schedule times the trips of their loops (libtpu 0.0.42, v5e,
float32, V = 262144, k = 64; both without the time that reductions across lanes wait):

    rows   this kernel   noise + lax.top_k
       8        97,000             640,000
      64       777,000           5,100,000

Of 369 bundles per 8 x 1024 tokens the noise takes about 280: 110 operations of Threefry, four per bundle, and
logarithms. 13 are for the bits that `jax.random.gumbel` leaves out, 9 to 12 on v5p, v6e and tpu7x. bfloat16 takes as
many. XLA's program takes half a minute to compile, this one two seconds.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.arrays.modes import with_standard_modes
from specjax.pallas_kernels.gumbel_topk.reference import gumbel, mask_invalid
from specjax.pallas_kernels.tuning import tuned_sizes

SUBLANES, LANES = 8, 128
MAX_K = 64
GROUP = 8  # slots per iteration of the loop over slots
FOLDED = 32  # with fewer rows, rows are split so that no sublane is idle
RARE = 1e-4  # probability per row that the kernel runs a second time


def unsupported_reason(keys, logits, k: int) -> str | None:
    """Return the reason why the kernel does not support these arguments, or None.

    A removed jax flag counts as its default.
    """
    if k > MAX_K:
        return f"takes k up to {MAX_K}, not {k}"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"takes float32 and bfloat16 logits, not {logits.dtype}"
    if keys is not None and not getattr(jax.config, "jax_threefry_partitionable", True):
        return "needs jax_threefry_partitionable"
    return None


@with_standard_modes  # Mosaic's indices are 32 bits
def gumbel_topk(
    keys, logits, k, *, temperature=None, valid=None, first_id=0, block=None, width=None, slots=None, device_kind=None,
    interpret=False,
):  # fmt: skip
    """Run the kernel; see `gumbel_topk` in the package.

    `valid` is applied by XLA, which fuses it into the computation of the logits.

    Args:
      block: tokens per grid step. None: from tuned.json, for `device_kind` if listed.
      width: tokens per iteration of the inner loop, a multiple of 128 that divides `block`. None: as for `block`.
      slots: tokens that each lane keeps at first. None: the fewest that make a second run rare.
      interpret: True or `pltpu.InterpretParams`, to run on any backend in tests.
    """
    sizes = tuned_sizes("gumbel_topk", device_kind)
    rows, vocab = logits.shape[:-1], logits.shape[-1]
    flat = math.prod(rows)
    words = jnp.zeros((flat, 2), jnp.uint32) if keys is None else jax.random.key_data(keys).reshape(flat, 2)
    first = jnp.broadcast_to(jnp.asarray(first_id, jnp.uint32), (flat, 1))
    words = jnp.concatenate([words, first], 1)  # inputs of a token's noise, besides its index in the row
    heat = jnp.broadcast_to(jnp.asarray(1.0 if temperature is None else temperature, jnp.float32), rows)
    ids, scores = _search(
        words, heat.reshape(flat, 1), mask_invalid(logits, valid).reshape(flat, vocab), k=k, noisy=keys is not None,
        heated=temperature is not None, block=block or sizes["block"], width=width or sizes["width"], slots=slots,
        interpret=interpret,
    )  # fmt: skip
    return ids.reshape(*rows, k) + first_id, scores.reshape(*rows, k)


@functools.partial(
    jax.jit, static_argnames=("k", "noisy", "heated", "block", "width", "slots", "interpret"), inline=True
)
def _search(words, heat, logits, *, k, noisy, heated, block, width, slots, interpret):
    """Search words uint32[R, 3], heat float32[R, 1], logits [R, V] -> ids int32[R, k], scores float32[R, k]."""
    rows = logits.shape[0]
    fold = SUBLANES // math.gcd(rows, SUBLANES) if rows < FOLDED else 1
    logits, block, width = _fold(logits, fold, block, width)
    words, heat = (jnp.repeat(x, fold, 0) for x in (words, heat))
    enough = min(k, pl.cdiv(logits.shape[1], LANES))  # a lane cannot contain more of the best k
    max_slots = _round_to_groups(enough)
    first = min(_round_to_groups(slots or _slots(k)), max_slots)

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
    if first == max_slots:
        return ids, scores
    return jax.lax.cond(drained, lambda: run(max_slots)[:2], lambda: (ids, scores))


def _slots(k: int) -> int:
    """Return the smallest number of slots such that a lane's slots are rarely all among the best k; k if it is small.

    It uses the union bound for tokens that fall on lanes at random, as they do with their ids modulo 128.
    """
    if k <= GROUP:
        return k
    return next(n for n in range(1, GROUP + 1) if n == GROUP or math.comb(k, n) / LANES ** (n - 1) < RARE)


def _round_to_groups(slots: int) -> int:
    return slots if slots <= GROUP else pl.cdiv(slots, GROUP) * GROUP


def _fold(logits, fold: int, block: int, width: int):
    """Split each row of `logits` [R, V] into `fold` rows: [R * fold, columns].

    Also return the block and width that fit.

    Eight rows lie on the sublanes; fewer would leave some idle. The cost of the copy is small in comparison.
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
    """Select the best k of the tokens that the lanes of each row keep, and find the drained lanes.

    A lane is drained if all tokens that it kept were taken.

    Returns: ids int32[rows, k], scores float32[rows, k], drained bool[rows, 128].
    """
    rows, columns = logits.shape
    body = functools.partial(
        _kernel, k=k, slots=slots, block=block, width=width, columns=columns, fold=fold, noisy=noisy, heated=heated
    )
    per_row = lambda size: pl.BlockSpec((SUBLANES, size), lambda row, step: (row, 0))
    inputs = words, heat, logits
    total = lambda *inputs: sum(jnp.sum(x.astype(jnp.float32)) for x in inputs)
    # Computed by jax, because the shape includes the mesh axes of a `shard_map` over which the values vary.
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
    """Stream a block [8, block] of eight rows through the slots [8, slots * 128] of their lanes.

    After the last block, select the best. Lanes after the end of a row may contain anything, including NaN, so they
    become -inf before they are compared. Rows after the last one only cost time, since rows are independent and no
    branch depends on a score.
    """
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        scores[...] = jnp.full(scores.shape, -jnp.inf, jnp.float32)
        ids[...] = jnp.zeros(ids.shape, jnp.int32)

    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 1)
    row = pl.program_id(0) * SUBLANES + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0)
    offset = jax.lax.rem(row, fold) * columns  # of this row's part of the vocabulary

    def process(trip, _):
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

    tokens_left = jnp.minimum(block, columns - step * block)
    jax.lax.fori_loop(0, jax.lax.div(tokens_left + width - 1, width), process, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        out_ids[...], out_scores[...], drained[...] = _select(scores, ids, k, slots)


def _insert(scores, ids, slots: int, new, tokens):
    """Insert candidates (tuples of [8, 128], ids ascending) into the sorted slots, the best first.

    A candidate goes before the slots that it beats, and these move down by one. Equal scores stay before it, because
    they have lower ids.
    """

    def pass_slot(slot, candidates):
        score, token = map(list, candidates)  # goes into the slot if the candidate beats it
        slot_scores, slot_ids = scores[:, _at(slot)], ids[:, _at(slot)]
        for i, candidate in enumerate(new):
            beaten = candidate > slot_scores
            slot_scores, score[i] = jnp.where(beaten, score[i], slot_scores), jnp.where(beaten, slot_scores, score[i])
            slot_ids, token[i] = jnp.where(beaten, token[i], slot_ids), jnp.where(beaten, slot_ids, token[i])
        scores[:, _at(slot)], ids[:, _at(slot)] = slot_scores, slot_ids
        return tuple(score), tuple(token)

    _each_slot(slots, pass_slot, (new, tokens))


def _select(scores, ids, k: int, slots: int):
    """Take the best of the lanes' first slots k times, of equal scores the lowest id; then that lane moves up.

    Returns: ids int32[8, 128] and scores float32[8, 128], of which the first k are used, and int32[8, 128], nonzero if
    the lane's last slot was taken.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    empty = jnp.full((SUBLANES, LANES), -jnp.inf, jnp.float32), jnp.zeros((SUBLANES, LANES), jnp.int32)

    def take(rank, carry):
        out_ids, out_scores, taken = carry
        first_scores, first_ids = scores[:, _at(0)], ids[:, _at(0)]
        best = jnp.max(first_scores, 1, keepdims=True)
        lowest = jnp.min(jnp.where(first_scores == best, first_ids, jnp.iinfo(jnp.int32).max), 1, keepdims=True)
        is_taken = (first_scores == best) & (first_ids == lowest) & (best > -jnp.inf)

        def move_up(index, below):
            """Move up by one slot, from the last to the first. `below` is the old content of the slot below."""
            at = _at(slots - 1 - index)
            current = scores[:, at], ids[:, at]
            scores[:, at], ids[:, at] = (jnp.where(is_taken, new, old) for new, old in zip(below, current, strict=True))
            return current

        _each_slot(slots, move_up, empty)
        is_rank = lane == rank
        return (
            jnp.where(is_rank, lowest, out_ids),
            jnp.where(is_rank, best, out_scores),
            taken + is_taken.astype(jnp.int32),
        )

    none = jnp.zeros((SUBLANES, LANES), jnp.int32)
    out_ids, out_scores, taken = jax.lax.fori_loop(0, k, take, (none, none.astype(jnp.float32), none))
    return out_ids, out_scores, (taken == slots).astype(jnp.int32)


def _at(slot):
    return pl.ds(pl.multiple_of(slot * LANES, LANES), LANES)


def _each_slot(slots: int, body, carry):
    """Run a `fori_loop` over the slots, unrolled if there are few, otherwise by groups."""
    group = min(slots, GROUP)
    if slots == group:
        return jax.lax.fori_loop(0, slots, body, carry, unroll=True)
    through_group = lambda i, carry: jax.lax.fori_loop(
        0, group, lambda n, carry: body(i * group + n, carry), carry, unroll=True
    )
    return jax.lax.fori_loop(0, slots // group, through_group, carry)
