"""Acceptance of the nodes of an unlimited STAND tree: the source of the default tree.

    python benchmarks/stand_tree.py TEXTS.json OUT.json [COUNT]

TEXTS.json is written by every_method.py --texts. The steps are replayed as in decoding. The target's distributions up
to the last token are stored. The ranks of the tokens that follow, as far as stored entries contain them, are
the path accepted. Takes the first COUNT texts. Prints how long the accepted paths are, without and with the
distributions of the prompt, and writes the 80 best paths of the latter.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.drafters.tables.stand import best_paths
from specjax.retrieval.contexts import MAX_TOKENS, ORDERS

DEEPEST, LONGEST = 8, 256  # tokens of a path; of prompt and text


@jax.jit
def likeliest(target, cache, tokens):
    """int32[T, 10] and float32[T, 10]: the likeliest successors at each position of tokens [1, T]."""
    t = tokens.shape[1]
    mask = jnp.tril(jnp.ones((1, t, t), bool))
    output, _ = target.model.forward(target.params, tokens, cache, positions=jnp.arange(t)[None], mask=mask)
    best, ids = jax.lax.top_k(jax.nn.log_softmax(output.logits[0]), MAX_TOKENS)
    return ids, jnp.exp(best)


def replay(prompt, text, ids, probs, read_prompt):
    """The rank paths accepted, one per round."""
    tables = {n: {} for n in ORDERS}
    tokens = prompt + text

    def learn(at):
        distribution = dict(zip(ids[at].tolist(), probs[at].tolist(), strict=True))
        for n, table in tables.items():
            if at + 1 >= n:
                context = tuple(tokens[at + 1 - n : at + 1])
                old, m = table.get(context, ({}, 0))
                mean = {t: (m * old.get(t, 0) + distribution.get(t, 0)) / (m + 1) for t in {*old, *distribution}}
                best = sorted(mean, key=lambda t: (-mean[t], t))[:MAX_TOKENS]
                table[context] = {t: mean[t] for t in best}, m + 1

    def path(start):
        ranks = []
        for at in range(start, min(start + DEEPEST, len(tokens) - 1)):
            entries = (tables[n].get(tuple(tokens[at + 1 - n : at + 1])) for n in ORDERS)
            entry = next((x for x in entries if x), None)
            ranked = list(entry[0]) if entry else []
            if tokens[at + 1] not in ranked:
                break
            ranks.append(ranked.index(tokens[at + 1]))
        return tuple(ranks)

    for at in range(len(prompt) - 1 if read_prompt else 0):
        learn(at)
    at = len(prompt) - 1
    while at < len(tokens) - 1:
        accepted = path(at)
        yield accepted
        for new in range(at, at + len(accepted) + 1):
            learn(new)
        at += len(accepted) + 1


def main(texts: str, out: str, count: str = "64") -> None:
    target, _ = specjax.load()
    with open(texts) as file:
        data = json.load(file)
    pairs = [x for x in zip(data["prompts"], data["texts"], strict=True) if sum(map(len, x)) <= LONGEST][: int(count)]
    distributions, cache = [], target.model.init_cache(target.params, None, 1, 1)
    for prompt, text in pairs:
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(prompt) + len(text)] = prompt + text
        distributions.append([np.asarray(x) for x in likeliest(target, cache, jnp.asarray(padded))])
    for read_prompt in (False, True):
        paths = [
            p
            for pair, distribution in zip(pairs, distributions, strict=True)
            for p in replay(*pair, *distribution, read_prompt)
        ]
        lengths = np.array([len(path) for path in paths])
        print(f"{len(paths)} rounds of {len(pairs)} texts, the prompt {'read' if read_prompt else 'not read'}:")
        print(f"  accepted {lengths.mean():.3f} on average, nothing at {np.mean(lengths == 0):.3f}")
        best = best_paths(paths, 80)
        for n in (7, 15, 32, 80):
            nodes = set(best[:n])
            accepted_lengths = [sum(path[: d + 1] in nodes for d in range(len(path))) for path in paths]
            print(f"  the best {n} nodes: {np.mean(accepted_lengths):.3f}")
    with open(out, "w") as file:
        json.dump(best, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
