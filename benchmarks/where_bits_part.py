"""Picture of the layers at which eight tokens in one pass differ in their bits from eight plain steps.

    python benchmarks/where_bits_part.py [--target SOURCE] [--out docs/where_bits_part.svg]

bfloat16, as it is usually computed and with the same bits: the largest difference in the residual stream behind each
layer, by the token's place in the pass. White: no bit differs.
"""

import argparse
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import specjax
from specjax.analysis.check_bits import _BitProbe

WIDTH, PASSES = 8, 4
TEXT = """A recipe for bread. Mix the flour with water, salt and yeast, and knead the dough for ten minutes. Let it rest
until it has doubled in size, which takes about an hour in a warm kitchen. Shape a loaf, let it rest again, and bake it
in a hot oven until the crust is dark and the bottom sounds hollow. Let it cool before you cut it, if you can wait."""


def largest(source: str | None, same_bits: bool) -> np.ndarray:
    """float64[WIDTH, layers + 1]: of the tokens at each place of a pass."""
    target, tokenizer = specjax.load(source, dtype="bfloat16", same_bits=same_bits)
    text = np.asarray(tokenizer.encode(TEXT), np.int32)
    ask = _BitProbe(target, text, len(text) - WIDTH * PASSES)
    plain, together = ask.one_by_one(), ask.chains(WIDTH)
    gaps = np.zeros((WIDTH, ask.num_layers + 1))  # 0: the embedding
    for at, probe in together.items():
        place = (at - ask.start) % WIDTH
        differs = np.abs(probe.stream - plain[at].stream).max((1, 2))
        gaps[place] = np.maximum(gaps[place], differs)
    return gaps


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    flags.add_argument("--out", type=Path, default=Path("docs/where_bits_part.svg"))
    args = flags.parse_args()
    plt.rcParams["svg.hashsalt"] = "specjax"
    figure, axes = plt.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    for axis, same_bits in zip(axes, (False, True), strict=True):
        gaps = largest(args.target, same_bits)
        logs = np.ma.masked_equal(gaps, 0)
        image = axis.imshow(np.ma.log2(logs), aspect="auto", cmap="viridis", vmin=-12, vmax=2, interpolation="nearest")
        axis.set(title="with the same bits" if same_bits else "bfloat16 as usual", ylabel="place in the pass")
        print("same bits" if same_bits else "usual", "largest difference", gaps.max(), "first layers that differ",
              [int(np.argmax(row > 0)) if row.any() else None for row in gaps])  # fmt: skip
    axes[-1].set_xlabel("layer")
    bar = figure.colorbar(image, ax=axes, label="largest difference in the stream")
    ticks = (-12, -8, -4, 0)
    bar.set_ticks(ticks, labels=[f"$2^{{{tick}}}$" for tick in ticks])
    figure.savefig(args.out, metadata={"Date": None})
    print(jax.devices()[0].platform, jax.__version__, args.out)


if __name__ == "__main__":
    main()
