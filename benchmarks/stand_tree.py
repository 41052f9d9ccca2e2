"""Which nodes of an unlimited STAND tree would be accepted: the source of the default tree.

    python benchmarks/stand_tree.py TEXTS.json OUT.json [--read-prompt]

TEXTS.json is written by real_equality.py --texts. The tables are replayed as in decoding: at each token of a text the
target's laws up to there are known, and the ranks of the tokens that follow, as long as entries are found and hold
them, are the path accepted. Writes the 80 best paths and prints how long the accepted paths are.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.drafters.stand import KEPT, ORDERS, best_paths

DEEPEST = 8


@jax.jit
def likeliest(target, tokens):
    """int32[T, 10] and float32[T, 10]: the likeliest successors at each position of tokens [1, T]."""
    t = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, t, t), bool))
    output, _ = target.model.forward(
        target.params, tokens, target.model.init_cache(1, 1), positions=jnp.arange(t)[None], mask=mask
    )
    best, ids = jax.lax.top_k(jax.nn.log_softmax(output.logits[0]), KEPT)
    return ids, jnp.exp(best)


def replay(prompt, text, ids, probs, read_prompt):
    """Rank paths accepted from each position of the text on."""
    tables = {n: {} for n in ORDERS}
    whole = prompt + text

    def learn(at):
        law = dict(zip(ids[at].tolist(), probs[at].tolist(), strict=True))
        for n, table in tables.items():
            if at + 1 >= n:
                context = tuple(whole[at + 1 - n : at + 1])
                old, m = table.get(context, ({}, 0))
                mean = {t: (m * old.get(t, 0) + law.get(t, 0)) / (m + 1) for t in {*old, *law}}
                best = sorted(mean, key=lambda t: (-mean[t], t))[:KEPT]
                table[context] = {t: mean[t] for t in best}, m + 1

    def path(start):
        ranks = []
        for at in range(start, min(start + DEEPEST, len(whole) - 1)):
            found = (tables[n].get(tuple(whole[at + 1 - n : at + 1])) for n in ORDERS)
            entry = next((x for x in found if x), None)
            ranked = list(entry[0]) if entry else []
            if whole[at + 1] not in ranked:
                break
            ranks.append(ranked.index(whole[at + 1]))
        return tuple(ranks)

    for at in range(len(prompt) - 1 if read_prompt else 0):
        learn(at)
    for at in range(len(prompt) - 1, len(whole) - 1):
        yield path(at)
        learn(at)


def main(texts: str, out: str, read_prompt: bool) -> None:
    target, _ = specjax.load()
    with open(texts) as file:
        data = json.load(file)
    paths = []
    for prompt, text in zip(data["prompts"], data["texts"], strict=True):
        if len(prompt) + len(text) <= 512:
            padded = np.zeros((1, 512), np.int32)
            padded[0, : len(prompt) + len(text)] = prompt + text
            ids, probs = map(np.asarray, likeliest(target, jnp.asarray(padded)))
            paths += replay(prompt, text, ids, probs, read_prompt)
    lengths = np.array([len(path) for path in paths])
    print(f"{len(paths)} positions; accepted {lengths.mean():.3f} on average, nothing at {np.mean(lengths == 0):.3f}")
    best = best_paths(paths, 80)
    for n in (8, 15, 32, 80):
        chosen = set(best[:n])
        held = [sum(path[: d + 1] in chosen for d in range(len(path))) for path in paths]
        print(f"the best {n} nodes: {np.mean(held):.3f}")
    with open(out, "w") as file:
        json.dump(best, file)


if __name__ == "__main__":
    main(*sys.argv[1:3], "--read-prompt" in sys.argv)
