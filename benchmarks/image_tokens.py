"""Lossless and lossy methods on the tiny model of images: tokens per pass, and the quality of the images.

    python benchmarks/image_tokens.py --models tests/data/images --out docs/image_tokens.json
    python benchmarks/image_tokens.py --models tests/data/images --picture docs/images.png --per-class 3 --methods ...

Each method samples the same number of images of every class, without guidance and with it. The quality is

- the accuracy of a classifier that scikit-learn trained on real digits,
- the Frechet distance of the classifier's hidden units between these images and those of plain decoding with other
  random numbers. The distance between two sets of plain decoding is the floor.

Newline tokens are forced, so they are free drafts of speculative Jacobi decoding.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import tiny_images
from toy_tasks import digits

import specjax
from specjax import processors, trees, verifiers
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.models import guided, unconditional
from specjax.types import Drafter, Target
from specjax.verifiers import Verifier

HIDDEN = 64


class Way(NamedTuple):
    """A method of the table: a function from the (guided) target and draft model, and the rule."""

    drafter: Callable[[Target, Target], Drafter]
    verifier: Verifier | None = None


class Models(NamedTuple):
    target: Target
    draft: Target
    codebook: np.ndarray


def chain(target: Target, draft: Target) -> Drafter:
    return two_model(draft, num_tokens=4)


def window(initial: str = "random", **options) -> Callable[[Target, Target], Drafter]:
    """Return speculative Jacobi decoding with this window of tokens."""
    return lambda target, draft: jacobi(
        digits.VOCABULARY, window=10, initial=initial, ids=(0, digits.CODES),
        forced=processors.forced_tokens(digits.layout()), **options,
    )  # fmt: skip


def ways(codebook: np.ndarray) -> dict[str, Way]:
    """Return the methods by name."""
    table = verifiers.nearest_codes(codebook, 8)
    rules = {
        **{f"LANTERN {delta}": verifiers.lantern(table, delta) for delta in (0.01, 0.05, 0.2)},
        "LANTERN++ 2": verifiers.lantern(table, 2.0, relative=True),
        **{f"GSD {size}": verifiers.grouped(size) for size in (4, 10)},
    }
    names = ("LANTERN 0.05", "GSD 4")
    tree = lambda target, draft: two_model(draft, tree=trees.parse("4x2x1x1"))
    return {
        "plain": Way(lambda target, draft: autoregressive()),
        "SJD": Way(window()),
        "SJD, token above": Way(window("repeat", stride=digits.ROW)),
        **{f"SJD, {name}": Way(window(), rules[name]) for name in names},
        "draft model": Way(chain),
        "draft model, tree 4x2x1x1": Way(tree),
        **{f"draft model, {name}": Way(chain, rule) for name, rule in rules.items()},
    }


@functools.cache
def classifier():
    """Return a classifier of real digits with one layer of hidden units."""
    from sklearn.neural_network import MLPClassifier

    data = digits.augmented(digits.digits()[0], 8000, seed=5)
    return MLPClassifier((HIDDEN,), max_iter=200, random_state=0).fit(scaled(data.images), data.classes)


def scaled(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1) / 16


def features(images: np.ndarray) -> np.ndarray:
    """Return the hidden units float64[N, HIDDEN] of the classifier."""
    model = classifier()
    return np.maximum(scaled(images) @ model.coefs_[0] + model.intercepts_[0], 0).astype(np.float64)


def frechet(x: np.ndarray, y: np.ndarray) -> float:
    """Return the Frechet distance of two normal distributions that are fitted to features [N, D]."""
    a, b = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    # The trace of the root of a product of two covariances is the sum of the roots of its eigenvalues.
    roots = np.sqrt(np.maximum(np.linalg.eigvals(a @ b).real, 0))
    return float(np.sum((x.mean(0) - y.mean(0)) ** 2) + np.trace(a) + np.trace(b) - 2 * np.sum(roots))


def accuracy(images: np.ndarray, classes: np.ndarray) -> float:
    return float(np.mean(classifier().predict(scaled(images)) == classes))


def sample(models: Models, way: Way, scale: float | None, per_class: int, seed: int, temperature: float = 1.0):
    """Return the result of decoding, and the classes of its images."""
    classes = np.repeat(np.arange(digits.CLASSES), per_class)
    target, draft, inputs = models.target, models.draft, None
    if scale is not None:
        target, draft = guided(target, scale), guided(draft, scale)
        inputs = unconditional([[digits.ANY]] * len(classes))
    prompts = [[digits.FIRST_CLASS + int(c)] for c in classes]
    result = specjax.decode(
        target, way.drafter(target, draft), prompts, key=jax.random.key(seed), max_new_tokens=digits.TOKENS,
        temperature=temperature, verifier=way.verifier, inputs=inputs, processors=(digits.layout(),),
    )  # fmt: skip
    return result, classes


def picture(path: Path, rows: dict[str, np.ndarray]) -> None:
    """Write the images [10 or more, 8, 8] of several methods, one row each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), 1, figsize=(9, 0.46 * len(rows)), squeeze=False)
    for (name, images), ax in zip(rows.items(), axes[:, 0], strict=True):
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), constant_values=8)
        ax.imshow(np.concatenate(list(padded), 1), cmap="gray", vmin=0, vmax=16, interpolation="nearest")
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        ax.set_xticks([])
        ax.set_yticks([])
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", required=True, type=Path)
    parser.add_argument("--out", type=Path, help="JSON file with the results; those of other scales stay")
    parser.add_argument("--picture", type=Path, help="PNG file with images of each method")
    parser.add_argument("--methods", nargs="+", help="names of the methods; all of them by default")
    parser.add_argument("--per-class", type=int, default=100)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 2.0], help="1: without guidance")
    args = parser.parse_args()
    if args.per_class < 2:
        parser.error("--per-class must be at least 2, for the two images of each class in a picture")
    models = Models(*tiny_images.load(args.models))
    methods = ways(models.codebook)
    unknown = set(args.methods or ()) - methods.keys()
    if unknown:
        parser.error(f"--methods: there is no {sorted(unknown)[0]!r}, only {', '.join(methods)}")
    held_out = digits.digits()[1]
    real = digits.to_images(digits.to_tokens(held_out.images, models.codebook), models.codebook)
    stored = json.loads(args.out.read_text()) if args.out and args.out.exists() else []
    again = lambda row: row.get("scale") in (None, *args.scales) and row["method"] in (args.methods or row["method"])
    table = [row for row in stored if not again(row) and "scale" in row]
    table.append({"method": "real images", "accuracy": accuracy(real, held_out.classes)})
    real_of = lambda c: real[held_out.classes == c][:2]
    pictures = {"real": np.concatenate([real_of(c) for c in range(digits.CLASSES)])}
    for scale in args.scales:
        guidance = None if scale == 1 else scale
        to_images = lambda result: digits.to_images(np.asarray(result.to_lists()), models.codebook)
        reference = features(to_images(sample(models, methods["plain"], guidance, 3 * args.per_class, seed=1)[0]))
        for name in args.methods or methods:
            way = methods[name]
            result, classes = sample(models, way, guidance, args.per_class, seed=0)
            images = to_images(result)
            passes = float(np.sum(result.stats.target_passes))
            table.append({
                "method": name, "scale": scale, "tokens_per_pass": float(np.sum(result.lengths)) / passes,
                "accuracy": accuracy(images, classes), "distance": frechet(features(images), reference),
                "exact": way.verifier is None,
            })  # fmt: skip
            print(json.dumps(table[-1]), flush=True)
            shown = [args.per_class * c + i for c in range(digits.CLASSES) for i in range(2)]
            pictures[f"{name}, scale {scale:g}"] = images[shown]
            if args.out is not None:
                args.out.write_text(json.dumps(table, indent=1) + "\n")
    if args.picture is not None:
        picture(args.picture, pictures)
    print(markdown(table))


def markdown(table: list[dict]) -> str:
    """Return the results as a table, with a row for each method and scale."""
    lines = ["| method | scale | tokens per pass | accuracy | distance |", "|---|---|---|---|---|"]
    for row in table:
        if "scale" in row:
            lines.append(
                f"| {row['method']} | {row['scale']:g} | {row['tokens_per_pass']:.2f} | {row['accuracy']:.1%} "
                f"| {row['distance']:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
