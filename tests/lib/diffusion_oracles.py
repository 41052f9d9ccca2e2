"""Samplers of diffusion models as their releases run them, in float64 NumPy, for one row at temperature 0.

Each loop follows the description of the release alone: a canvas, a pass, a choice of columns. The model is a plain
Llama with any attention mask. `decided` numbers the passes that read masked columns, from 0."""

from __future__ import annotations

import jax
import numpy as np

from specjax.types import Target


def softmax(logits):
    e = np.exp(logits - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class NumpyLlama:
    """The weights of a `Target`; `blank` is its mask token, which is never proposed."""

    def __init__(self, target: Target, blank: int, *, shifted: bool = False):
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), target.params)
        self.c, self.blank, self.shifted = target.model.config, blank, shifted

    def __call__(self, tokens, columns, sees, past=None):
        """Logits [T, V] of tokens [T] at columns [T], and their keys and values with those of `past` before them.

        sees: bool[T, S + T], with S the columns of `past`."""
        c, h = self.c, self.w["embed"]["weight"][np.asarray(tokens)]
        cache = []
        for i in range(c.num_layers):
            layer = self.w["layers"][i]
            x = self._norm(h, layer["attention_norm"]["weight"])
            q, k, v = (
                (x @ layer["attention"][name]["weight"].T).reshape(len(tokens), -1, c.head_dim) for name in "qkv"
            )
            q, k = self._turned(q, columns), self._turned(k, columns)
            if past is not None:
                k, v = np.concatenate([past[i][0], k]), np.concatenate([past[i][1], v])
            cache.append((k, v))
            groups = c.num_heads // c.num_kv_heads
            scores = np.einsum("thd,shd->hts", q, np.repeat(k, groups, 1)) / np.sqrt(c.head_dim)
            weights = softmax(np.where(sees[None], scores, -1e30))
            out = np.einsum("hts,shd->thd", weights, np.repeat(v, groups, 1)).reshape(len(tokens), -1)
            h = h + out @ layer["attention"]["o"]["weight"].T
            x = self._norm(h, layer["mlp_norm"]["weight"])
            gate = x @ layer["mlp"]["gate"]["weight"].T
            up = x @ layer["mlp"]["up"]["weight"].T
            h = h + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down"]["weight"].T
        logits = self._norm(h, self.w["norm"]["weight"]) @ self.w["head"]["weight"].T
        logits[:, self.blank] = -np.inf
        return logits, cache

    def whole(self, tokens):
        """Logits [N, V] of a canvas with full attention; row i predicts column i."""
        size = len(tokens)
        logits, cache = self(tokens, np.arange(size), np.ones((size, size), bool))
        return (np.concatenate([logits[:1], logits[:-1]]) if self.shifted else logits), cache

    def _norm(self, x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.norm_eps) * weight

    def _turned(self, x, columns):
        half = x.shape[-1] // 2
        angle = np.asarray(columns)[:, None] / self.c.rope_base ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Canvas:
    """Prompt and masks, and the pass that decided each column."""

    def __init__(self, model, prompt, end):
        self.tokens = np.array([*prompt, *[model.blank] * (end - len(prompt))])
        self.open = np.arange(end) >= len(prompt)
        self.decided = np.full(end, -2)
        self.start = len(prompt)

    def take(self, columns, words, number):
        for column in columns:
            self.tokens[column], self.open[column], self.decided[column] = words[column], False, number

    def result(self, count):
        return self.tokens[self.start :][:count].tolist(), self.decided[self.start :][:count].tolist()


def best_of(columns, score, count):
    """The `count` columns with the largest score, ties to the lower one."""
    return sorted(columns, key=lambda column: (-score[column], column))[:count]


def nucleus(logits, mass):
    """Logits of the smallest set of tokens whose probability reaches `mass`, -inf elsewhere."""
    order = np.argsort(-logits, -1, kind="stable")
    p = np.take_along_axis(softmax(logits), order, -1)
    outside = np.cumsum(p, -1) - p >= mass
    return np.where(np.take_along_axis(outside, np.argsort(order, -1), -1), -np.inf, logits)


def dimple(model, prompt, count, *, gamma, steps, eps=1e-3):
    """The first pass reads prompt and masks together, then the cache is cropped to the prompt but its last token."""
    canvas, times = Canvas(model, prompt, len(prompt) + count), np.linspace(1, eps, steps + 1)
    behind, past = len(prompt) - 1, None
    for i in range(steps):
        if past is None:
            logits, cache = model.whole(canvas.tokens)
            past = [(k[:behind], v[:behind]) for k, v in cache]
        else:
            columns = np.arange(behind, len(canvas.tokens))
            sees = np.ones((len(columns), len(canvas.tokens)), bool)
            rows, _ = model(canvas.tokens[behind:], columns, sees, past)
            rows = np.concatenate([rows[:1], rows[:-1]]) if model.shifted else rows
            logits = np.concatenate([np.zeros((behind, rows.shape[1])), rows])
        words, sure = logits.argmax(-1), softmax(logits).max(-1)
        masked = np.flatnonzero(canvas.open)
        picks = masked if i == steps - 1 else [c for c in masked if sure[c] > gamma]
        if not len(picks):
            t = len(masked) / count
            for k in range(max(int(np.flatnonzero(times < t)[0]), i + 1), steps + 1):
                share = len(masked) if k == steps else int(len(masked) * (1 - times[k] / t))
                if share >= 1:
                    break
            picks = best_of(masked, sure, share)
        canvas.take(picks, words, i)
        if not canvas.open.any():
            break
    return canvas.result(count)


def in_blocks(model, prompt, count, block, choose):
    """Block-causal decoding without a cache. `choose(open columns, logits [N, V], step of the block) -> columns`.

    Of shifted models the pass over a finished block decides the next block's first column, by the largest logit."""
    end = -(-(len(prompt) + count) // block) * block
    canvas, number = Canvas(model, prompt, end), 0

    def rows(upto):
        of = np.arange(upto) // block
        logits, _ = model(canvas.tokens[:upto], np.arange(upto), of[:, None] >= of[None])
        return logits

    for first in range(len(prompt) // block * block, end, block):
        if model.shifted and canvas.open[first]:
            canvas.take([first], {first: rows(first)[-1].argmax()}, number)
            number += 1
        step = 0
        while canvas.open[first : first + block].any():
            logits = rows(first + block)
            logits = np.concatenate([logits[:1], logits[:-1]]) if model.shifted else logits
            masked = [c for c in range(first, first + block) if canvas.open[c]]
            canvas.take(choose(masked, logits, step), logits.argmax(-1), number)
            number, step = number + 1, step + 1
    return canvas.result(count)


def fast_dllm_v2(model, prompt, count, *, block, sub_block, tau):
    """At temperature 0 the confidence is the plain softmax, whatever the nucleus."""

    def choose(masked, logits, step):
        part = [c for c in masked if c // sub_block == masked[0] // sub_block]
        sure = softmax(logits).max(-1)
        return {*best_of(part, sure, 1), *(c for c in part if sure[c] > tau)}

    return in_blocks(model, prompt, count, block, choose)


def sdar(model, prompt, count, *, block, steps, tau):
    """`low_confidence_dynamic`; the quotas come from the block's length."""

    def choose(masked, logits, step):
        quota = block // steps + (step < block % steps)
        sure = softmax(logits).max(-1)
        high = [c for c in masked if sure[c] > tau]
        return high if len(high) >= quota else best_of(masked, sure, quota)

    return in_blocks(model, prompt, count, block, choose)


def llada(model, prompt, count, *, block, steps, factor=None, ends=(), fill=None):
    """Blocks of a canvas with full attention. `factor(step of the block)` of the confidence of `ends`; `fill(pass,
    canvas, logits)` decides that all is filled."""
    canvas, number = Canvas(model, prompt, len(prompt) + count), 0
    for first in range(len(prompt), len(prompt) + count, block):
        block_columns = range(first, min(first + block, len(prompt) + count))
        quotas = [len(block_columns) // steps + (step < len(block_columns) % steps) for step in range(steps)]
        for step, quota in enumerate(quota for quota in quotas if quota):
            logits, _ = model.whole(canvas.tokens)
            words, sure = logits.argmax(-1), softmax(logits).max(-1)
            if fill is not None and fill(number, canvas, logits):
                canvas.take(np.flatnonzero(canvas.open), words, number)
                return canvas.result(count)
            if factor is not None:
                sure = np.where(np.isin(words, ends), sure * factor(step), sure)
            canvas.take(best_of([c for c in block_columns if canvas.open[c]], sure, quota), words, number)
            number += 1
    return canvas.result(count)


def prophet(model, prompt, count, *, block, steps, gaps):
    """The release counts its step from 1; the answer is all that is masked."""
    total = -(-count // block) * steps

    def fill(number, canvas, logits):
        two = np.sort(logits[canvas.open], -1)[:, -2:]
        share = (number + 1) / total
        enough = gaps[0] if share < 0.33 else gaps[1] if share < 0.67 else gaps[2]
        return (two[:, 1] - two[:, 0]).mean() >= enough

    return llada(model, prompt, count, block=block, steps=steps, fill=fill)


def eoser(model, prompt, count, *, block, steps, first, last, ends):
    """The step index restarts in every block, the total does not."""
    total = -(-count // block) * steps
    factor = lambda step: first + (last - first) * min(step, total - 1) / (total - 1)
    return llada(model, prompt, count, block=block, steps=steps, factor=factor, ends=ends)


def dream(model, prompt, count, *, steps, alg, top_p=1.0, eps=1e-3):
    """top-p cuts the logits at temperature 0 too, and the scores are those of the cut distribution."""
    canvas, times, number = Canvas(model, prompt, len(prompt) + count), np.linspace(1, eps, steps + 1), 0
    for i in range(steps):
        masked = np.flatnonzero(canvas.open)
        quota = len(masked) if i == steps - 1 else int(len(masked) * (1 - times[i + 1] / times[i]))
        if quota:
            logits, _ = model.whole(canvas.tokens)
            p = softmax(nucleus(logits, top_p))
            two = np.sort(p, -1)[:, -2:]
            with np.errstate(divide="ignore", invalid="ignore"):
                scores = {
                    "maskgit_plus": two[:, 1], "topk_margin": two[:, 1] - two[:, 0],
                    "entropy": np.where(p > 0, p * np.log(p), 0.0).sum(-1),
                }  # fmt: skip
            canvas.take(best_of(masked, scores[alg], quota), logits.argmax(-1), number)
            number += 1
    return canvas.result(count)


def released_factor(sure, factor):
    """Return how many columns Fast-dLLM's released loop takes, of confidences sorted descending."""
    bounds = [1 - factor / (n + 1) for n in range(1, len(sure) + 1)]
    bounds[0] = -1
    last = len(sure) - 1
    index = next((i for i in range(len(sure)) if sure[i] < bounds[i]), last)
    return index + 1 if index in (0, last) else index
