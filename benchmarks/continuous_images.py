"""Continuous speculative decoding on a tiny model of digits: tokens per pass and the quality of the images.

    python benchmarks/continuous_images.py --out docs/continuous_images

An image of 8 by 8 pixels is 16 tokens, squares of 2 by 2 pixels, each a vector of four numbers. A causal transformer
reads the class and the tokens before, and a diffusion head draws the next token in a few steps. The draft model has one
layer. It shares the head, and learns the head's inputs from the target. Both are trained here, in a few minutes.

Accuracy and the Frechet distance are those of `image_tokens.py`. Each method samples the same number of images per
class. The distance of two sets of plain decoding is the floor.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from image_tokens import accuracy, features, frechet, picture
from toy_tasks import digits

from specjax.decoders.continuous import ContinuousModel, continuous

SQUARE, PER_SIDE = 2, 4
TOKENS, DIM = PER_SIDE**2, SQUARE**2
STEPS = 12
LAST_STD = 0.1  # of the last step; a step between two grey values is 0.125
HEADS = 4


def to_tokens(images: np.ndarray) -> np.ndarray:
    """Return the tokens float32[N, 16, 4], from -1 to 1, of images."""
    squares = (images / 8 - 1).reshape(-1, PER_SIDE, SQUARE, PER_SIDE, SQUARE).transpose(0, 1, 3, 2, 4)
    return squares.reshape(-1, TOKENS, DIM).astype(np.float32)


def to_images(tokens: np.ndarray) -> np.ndarray:
    """Return the images float32[N, 8, 8] of tokens."""
    squares = np.asarray(tokens).reshape(-1, PER_SIDE, PER_SIDE, SQUARE, SQUARE).transpose(0, 1, 3, 2, 4)
    return np.clip((squares.reshape(-1, digits.SIDE, digits.SIDE) + 1) * 8, 0, 16)


def schedule() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return, by step from 0 to STEPS, the shares of the data that remain, the factors of x_0 and x_t, and the stds."""
    remain = np.cos(np.arange(STEPS + 1) / STEPS * np.pi / 2 * 0.98) ** 2
    earlier = np.concatenate([[1.0], remain[:-1]])
    alpha = remain / earlier
    of_data = np.sqrt(earlier) * (1 - alpha) / np.maximum(1 - remain, 1e-9)
    of_state = np.sqrt(alpha) * (1 - earlier) / np.maximum(1 - remain, 1e-9)
    std = np.sqrt((1 - earlier) / np.maximum(1 - remain, 1e-9) * (1 - alpha))
    std[1] = LAST_STD
    return tuple(x.astype(np.float32) for x in (remain, of_data, of_state, std))


REMAIN, OF_DATA, OF_STATE, STD = schedule()


def init(key: jax.Array, width: int, layers: int) -> dict[str, Any]:
    """Return random parameters of a backbone whose outputs have WIDTH numbers, and of a head."""
    keys = iter(jax.random.split(key, 8 * layers + 12))
    linear = lambda inputs, outputs: jax.random.normal(next(keys), (inputs, outputs)) * inputs**-0.5
    block = lambda: {
        "qkv": linear(width, 3 * width), "out": linear(width, width) * 0.5, "up": linear(width, 4 * width),
        "down": linear(4 * width, width) * 0.5,
    }  # fmt: skip
    return {
        "classes": jax.random.normal(next(keys), (digits.CLASSES, width)),
        "places": 0.1 * jax.random.normal(next(keys), (TOKENS + 1, width)), "embed": linear(DIM, width),
        "blocks": [block() for _ in range(layers)], "z": linear(width, WIDTH),
        "head": {
            "state": linear(DIM, WIDTH), "step": jax.random.normal(next(keys), (STEPS + 1, WIDTH)),
            "one": linear(WIDTH, WIDTH), "two": linear(WIDTH, WIDTH), "data": linear(WIDTH, DIM) * 0.1,
        },
    }  # fmt: skip


WIDTH = 96


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def backbone(params: dict, classes: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return z [B, S + 1, WIDTH]: z[:, i] depends on the class and the first i tokens [B, S, DIM]."""
    start = params["classes"][classes][:, None]
    count = tokens.shape[1] + 1
    places = params["places"][jnp.minimum(jnp.arange(count), TOKENS)]
    x = jnp.concatenate([start, tokens @ params["embed"]], 1) + places
    mask = jnp.tril(jnp.ones((count, count), bool))
    for block in params["blocks"]:
        q, k, v = jnp.split((norm(x) @ block["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(mask, scores, -1e9), -1), v)
        x = x + attended.reshape(x.shape) @ block["out"]
        x = x + jax.nn.gelu(norm(x) @ block["up"]) @ block["down"]
    return norm(x) @ params["z"]


def predict(head: dict, t: Any, x: jax.Array, z: jax.Array) -> jax.Array:
    """Return the predicted token x_0 [..., DIM] from the state x [..., DIM] of step t."""
    h = jax.nn.silu(x @ head["state"] + head["step"][t] + z)
    h = h + jax.nn.silu(norm(h) @ head["one"] + z)
    h = h + jax.nn.silu(norm(h) @ head["two"])
    return jnp.clip(norm(h) @ head["data"], -1.2, 1.2)


def model(params: dict) -> ContinuousModel:
    """Return a model for `continuous`."""

    def take(params, classes, tokens, positions):
        return jnp.take_along_axis(backbone(params, classes, tokens), positions[:, :, None], 1)

    def mean(params, t, x, z):
        return jnp.asarray(OF_DATA)[t] * predict(params["head"], t, x, z) + jnp.asarray(OF_STATE)[t] * x

    return ContinuousModel(take, mean, lambda params, t, z: jnp.asarray(STD)[t], DIM, STEPS, params)


def loss_of(params: dict, classes: jax.Array, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean squared error of x_0 at random steps, four per token, and z."""
    z = backbone(params, classes, tokens)[:, :-1]
    times, noise = jax.random.split(key)
    shape = (4, *tokens.shape[:2])
    t = jax.random.randint(times, shape, 1, STEPS + 1)
    remain = jnp.asarray(REMAIN)[t][..., None]
    x = jnp.sqrt(remain) * tokens + jnp.sqrt(1 - remain) * jax.random.normal(noise, (*shape, DIM))
    weight = 1 / (1 - remain + 0.1)  # late steps decide how sharp an image is
    return jnp.mean(weight * (predict(params["head"], t, x, z) - tokens) ** 2), z


def train(params: dict, teacher: dict | None, steps: int, batch: int, rate: float) -> dict:
    """Return trained parameters. A draft model has the head of its teacher, and also learns the teacher's z."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    if teacher is not None:
        params = params | {"head": teacher["head"]}

    def objective(params, classes, tokens, key):
        if teacher is None:
            return loss_of(params, classes, tokens, key)[0]
        loss, z = loss_of(params | {"head": teacher["head"]}, classes, tokens, key)
        target = backbone(teacher, classes, tokens)[:, :-1]
        return loss + jnp.mean((z - target) ** 2) / jnp.mean(target**2)

    @jax.jit
    def step(params, state, classes, tokens, key):
        loss, gradient = jax.value_and_grad(objective)(params, classes, tokens, key)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    data = digits.augmented(digits.digits()[0], 20_000, seed=1)
    tokens = to_tokens(data.images)
    rng = np.random.default_rng(0)
    for i in range(steps):
        index = rng.integers(0, len(tokens), batch)
        inputs = jnp.asarray(data.classes[index]), jnp.asarray(tokens[index])
        params, state, loss = step(params, state, *inputs, jax.random.key(i))
        if i % 500 == 0 or i == steps - 1:
            print(f"step {i}: loss {float(loss):.4f}", flush=True)
    return params if teacher is None else params | {"head": teacher["head"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--per-class", type=int, default=60)
    parser.add_argument("--windows", type=int, nargs="+", default=[4])
    parser.add_argument("--out", type=Path, default=Path("continuous_images"))
    args = parser.parse_args()
    target = train(init(jax.random.key(0), 96, 3), None, args.steps, args.batch, args.rate)
    draft = train(init(jax.random.key(1), 48, 1), target, args.steps // 2, args.batch, args.rate)
    pair = model(target), dataclasses.replace(model(target), params=draft)
    classes = np.repeat(np.arange(digits.CLASSES), args.per_class)
    prompts = np.zeros((len(classes), 0, DIM), np.float32)

    def sample(seed: int, count: int = 1, **options) -> tuple[Any, np.ndarray]:
        condition = jnp.asarray(np.tile(classes, count))
        empty = np.tile(prompts, (count, 1, 1))
        result = continuous(*pair, empty, key=seed, max_new_tokens=TOKENS, condition=condition, **options)
        return result, to_images(np.asarray(result.tokens))

    floor = features(sample(99, count=3, prefill_ratio=1.0)[1])
    ways = {"plain": {"prefill_ratio": 1.0}} | {
        f"{ratio}, window {window}": {"ratio": ratio, "window": window, "prefill_ratio": 0.0}
        for window in args.windows for ratio in ("path", "coupled")
    }  # fmt: skip
    rows, shown = [], {}
    for name, options in ways.items():
        result, images = sample(0, **options)
        passes = float(np.asarray(result.stats.target_passes).mean())
        distance, wrong = frechet(features(images), floor), int(np.asarray(result.exhausted).sum())
        quality = {"accuracy": accuracy(images, classes), "distance": distance}
        rows.append({"method": name, "per_pass": TOKENS / passes, **quality, "exhausted": wrong})
        shown[name] = images[:: args.per_class // 2][:20]
        print(json.dumps(rows[-1]), flush=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    picture(args.out.with_suffix(".png"), shown)


if __name__ == "__main__":
    main()
