"""A tiny model of images and its draft model, trained on the handwritten digits of scikit-learn.

    python benchmarks/tiny_images.py --out tests/data/images --run build/tiny_images

The tokens are those of `toy_tasks.digits`. A tenth of the images have the class ANY, so that the model can be guided.
Both models are Llamas, trained by `specjax.training`. An interrupted run continues from its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file
from tiny_hybrid import on_progress, rounded
from toy_tasks import digits

import specjax
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.training import TrainingText, recipe_of, train

LENGTH = 205  # five images
SIZES = {"model": (96, 4, 3), "draft": (32, 1, 1)}
"""Width, layers and heads of each model."""


def config(name: str) -> LlamaConfig:
    """Return the shapes: 431,000 parameters of the model, and 14,000 of the draft model."""
    width, layers, heads = SIZES[name]
    return LlamaConfig(
        vocab_size=digits.VOCABULARY, width=width, num_layers=layers, num_heads=heads, num_kv_heads=heads,
        head_dim=32, mlp_width=int(2.5 * width), tied=True, max_positions=512, name=f"tiny-images-{name}",
    )  # fmt: skip


def untrained(name: str, seed: int) -> specjax.Target:
    """Return a model with random parameters."""
    return specjax.Target(make_model(config(name)), init_params(config(name), jax.random.key(seed)))


def tokenizer() -> Tokenizer:
    """Return a tokenizer with a word for each code, the newline and each class."""
    classes = [f"digit{n}" for n in range(digits.CLASSES)]
    words = [*(f"code{n}" for n in range(digits.CODES)), "newline", *classes, "any"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "any"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(LibraryCodec(backend), tuple(words), (), None, {})


def texts(codebook: np.ndarray, count: int, seed: int, unconditional: float = 0.1) -> list[TrainingText]:
    """Return images after their class, or after ANY for a share of them."""
    data = digits.augmented(digits.digits()[0], count, seed)
    is_any = np.random.default_rng(seed).random(count) < unconditional
    classes = np.where(is_any, digits.ANY, digits.FIRST_CLASS + data.classes)
    tokens = digits.to_tokens(data.images, codebook)
    return [TrainingText((int(c), *map(int, image)), 1) for c, image in zip(classes, tokens, strict=True)]


def write(folder: Path, name: str, target: specjax.Target) -> None:
    """Write a model in bfloat16."""
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), target.params)
    model = make_model(dataclasses.replace(config(name), dtype="bfloat16"))
    specjax.save_model(folder / name, specjax.Target(model, narrow), tokenizer())


def load(folder: Path) -> tuple[specjax.Target, specjax.Target, np.ndarray]:
    """Return the model, its draft model and the codebook."""
    model, draft = (specjax.load(folder / name, dtype="float32")[0] for name in SIZES)
    return model, draft, load_file(folder / "codebook.safetensors")["codebook"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of the models")
    parser.add_argument("--run", required=True, type=Path, help="folder of the state of the training")
    parser.add_argument("--images", type=int, default=100_000, help="for the model; its draft model has half of them")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    codebook = digits.make_codebook(digits.digits()[0].images, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file({"codebook": codebook}, args.out / "codebook.safetensors")
    recipe = recipe_of("fastdraft_pretraining", optimizer="muon", learning_rate=1e-2, tables=1.0)
    for name in SIZES:
        lessons = texts(codebook, args.images // (1 if name == "model" else 2), args.seed + 1)
        target = train(
            None, untrained(name, args.seed), lessons, recipe=recipe, folder=args.run / name, rows=args.rows,
            length=LENGTH, seed=args.seed, evaluate_every=50, on_progress=on_progress,
        )  # fmt: skip
        write(args.out, name, rounded(target))


if __name__ == "__main__":
    main()
