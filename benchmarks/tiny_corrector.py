"""A tiny model in the form of T5 that corrects sentences, and a block drafter for it (generalised aggressive decoding).

    python benchmarks/tiny_corrector.py tinystories.txt --out build/corrector --minutes 6

The errors are those of `toy_tasks.corrections`, in sentences of the text file, of which the last 400 are held out. The
corrector reads the sentence with errors and writes it without them. The block drafter starts from the corrector and is
trained on blocks of mask tokens behind a part of the corrected text. `benchmarks/aggressive_decoding.py` measures both.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from toy_tasks.corrections import Correction, sentences, with_errors

import specjax
from specjax.models import init_params, make_model, sources
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.models.seq2seq.config import T5Config
from specjax.types import Array, PyTree, Source

PAD, END, UNKNOWN, MASK = range(4)
PIECES = "<pad>", "</s>", "<unk>", "<mask>"
VOCABULARY, LONGEST, HELD_OUT = 768, 32, 400
BLOCK, CUTS = 8, 3  # masks of a block, and blocks of a text in a training step
SHARE = 0.7  # part of the time that the corrector has


def config() -> T5Config:
    """Return the shapes: 0.7 million parameters."""
    return T5Config(
        vocab_size=VOCABULARY, width=96, num_layers=2, encoder_layers=2, num_heads=3, num_kv_heads=3, head_dim=32,
        mlp_width=192, norm_eps=1e-6, query_scale=1.0, tied=True, scales_output=True, max_positions=256,
        name="tiny-corrector",
    )  # fmt: skip


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a tokenizer of VOCABULARY pieces of the texts."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=PIECES[UNKNOWN]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(PIECES), show_progress=False
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    vocab = backend.get_vocab()
    names = {"eos_token": PIECES[END], "pad_token": PIECES[PAD]}
    return Tokenizer(LibraryCodec(backend), tuple(sorted(vocab, key=vocab.get)), (END,), None, names)


def untrained() -> specjax.Target:
    """Return the model with random parameters, in which copying is close.

    Queries have the scale that other models divide scores by. Keys of the source start as its queries, so that a token
    finds itself in the source. One head of the encoder starts at the next token, and one at the token before.
    """
    params: Any = init_params(config(), jax.random.key(0))
    for layer in (*params["encoder"].values(), *params["layers"].values()):
        for part in (layer[name] for name in ("attention", "source") if name in layer):
            part["q"]["weight"] *= config().head_dim ** -0.5
            part["o"]["weight"] *= 0.5
        layer["mlp"]["down"]["weight"] *= 0.5
    for layer in params["layers"].values():
        layer["source"]["k"]["weight"] = layer["source"]["q"]["weight"] * config().head_dim ** 0.5
    table = params["encoder_bias"][0]["table"]
    later = config().buckets.num_buckets // 2 + 1
    params["encoder_bias"][0]["table"] = table.at[later, 0].add(6.0).at[1, 1].add(6.0)
    return specjax.Target(make_model(config()), params)


class Pairs:
    """Corrections as token ids, with new errors in every batch."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        self.texts, self.tokenizer, self.rng = texts, tokenizer, np.random.default_rng(1)

    def encode(self, pair: Correction) -> tuple[list[int], list[int]]:
        """Return the source and the text, each with its end."""
        return tuple([*self.tokenizer.encode(part), END] for part in pair)  # type: ignore[return-value]

    def batch(self, rows: int) -> tuple[Source, np.ndarray]:
        """Return sources, and texts int32[B, LONGEST + 1] that begin with PAD."""
        pairs: list[tuple[list[int], list[int]]] = []
        while len(pairs) < rows:
            ids = self.encode(with_errors(self.texts[self.rng.integers(len(self.texts))], self.rng))
            if max(map(len, ids)) <= LONGEST:
                pairs.append(ids)
        texts = np.full((rows, LONGEST + 1), PAD, np.int32)
        for row, (_, text) in zip(texts, pairs, strict=True):
            row[1 : len(text) + 1] = text
        return sources([source for source, _ in pairs], length=LONGEST), texts


def run_decoder(model: Any, params: PyTree, source: Source, tokens: Array, positions: Array, mask: Array) -> Array:
    """Return the logits of tokens [B, T] for their sources."""
    cache = model.init_cache(params, source, len(tokens), 1)
    return model.forward(params, tokens, cache, positions=positions, mask=mask)[0].logits


def corrector_loss(model: Any, params: PyTree, source: Source, texts: Array, key: Array) -> Array:
    """Return the cross-entropy of the next token."""
    del key
    tokens, labels = texts[:, :-1], texts[:, 1:]
    place = jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((LONGEST, LONGEST), bool)), (*tokens.shape, LONGEST))
    losses = optax.softmax_cross_entropy_with_integer_labels(
        run_decoder(model, params, source, tokens, place, mask), labels
    )
    return jnp.sum(losses * (labels != PAD)) / jnp.sum(labels != PAD)


def block_loss(model: Any, params: PyTree, source: Source, texts: Array, key: Array) -> Array:
    """Return the cross-entropy of the tokens at blocks of masks, which see the text before them."""
    batch, size = texts.shape
    length = jnp.sum(texts[:, 1:] != PAD, 1) + 1
    cut = 1 + jnp.floor(jax.random.uniform(key, (batch, CUTS)) * (length[:, None] - 1)).astype(jnp.int32)
    at = (cut[..., None] + jnp.arange(BLOCK)).reshape(batch, -1)
    tokens = jnp.concatenate([texts, jnp.full_like(at, MASK)], 1)
    positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(size), texts.shape), at], 1)
    group = jnp.concatenate([jnp.full(size, -1), jnp.repeat(jnp.arange(CUTS), BLOCK)])
    begin = jnp.concatenate([jnp.arange(size)[None] + jnp.ones((batch, 1), int), jnp.repeat(cut, BLOCK, 1)], 1)
    sees_text = (group == -1) & (positions[:, None] < begin[:, :, None])
    sees_block = (group[:, None] == group) & (group >= 0) & (positions[:, None] <= positions[:, :, None])
    logits = run_decoder(model, params, source, tokens, positions, sees_text | sees_block)[:, size:]
    labels = jnp.take_along_axis(jnp.pad(texts, ((0, 0), (0, BLOCK))), at, 1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * (labels != PAD)) / jnp.sum(labels != PAD)


def train(
    model: Any, params: PyTree, loss: Callable[..., Array], pairs: Pairs, seconds: float, rate: float, rows: int
) -> PyTree:  # fmt: skip
    """Return parameters after training for this time. The learning rate rises for 100 steps and falls with the time."""
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=rate, b2=0.98, weight_decay=0.01)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, source, texts, key, current_rate):
        value, gradient = jax.value_and_grad(functools.partial(loss, model))(params, source, texts, key)
        gradient = optax.clip_by_global_norm(1.0).update(gradient, optax.EmptyState())[0]
        state.hyperparams["learning_rate"] = current_rate
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, start, number = optimizer.init(params), time.monotonic(), 0
    while (passed := (time.monotonic() - start) / seconds) < 1:
        current_rate = rate * min((number + 1) / 100, 1.0) * min(1.0, 2.5 * (1 - passed))
        params, state, value = step(params, state, *pairs.batch(rows), jax.random.key(number), current_rate)
        number += 1
        if number % 200 == 0:
            print(f"{loss.__name__} step {number} loss {float(value):.3f} {passed:.0%}", flush=True)
    print(f"{loss.__name__}: {number} steps", flush=True)
    return params


def main() -> None:
    """Train both models, and write them and the held-out sentences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    texts = sentences(args.text)
    training, held_out = texts[:-HELD_OUT], texts[-HELD_OUT:]
    rng = np.random.default_rng(0)
    tokenizer = make_tokenizer([part for text in training for part in with_errors(text, rng)])
    target, pairs = untrained(), Pairs(training, tokenizer)
    print(f"{len(training)} sentences, {sum(x.size for x in jax.tree.leaves(target.params)):,} parameters", flush=True)
    seconds = 60 * args.minutes
    corrector = train(target.model, target.params, corrector_loss, pairs, SHARE * seconds, 3e-3, args.rows)
    specjax.save_model(args.out / "corrector", specjax.Target(target.model, corrector), tokenizer)
    copy = jax.tree.map(jnp.copy, corrector)
    blocks = train(target.model, copy, block_loss, pairs, (1 - SHARE) * seconds, 1.5e-3, args.rows)
    specjax.save_model(args.out / "blocks", specjax.Target(target.model, blocks), tokenizer)
    (args.out / "held_out.txt").write_text("\n".join(held_out) + "\n")


if __name__ == "__main__":
    main()
