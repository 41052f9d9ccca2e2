"""An autoregressive model made a block-diffusion model: what training on plain texts makes of it.

    python benchmarks/blocks_from_autoregressive.py train stories260K.bin --texts stories.txt --out blocks.safetensors
    python benchmarks/blocks_from_autoregressive.py measure stories260K.bin blocks.safetensors --texts stories.txt

`train` begins with the weights as they are and teaches them to fill masked columns of blocks, of which each sees itself
as it is masked and the blocks before as they are (`specjax.training.objectives.masked`). With --alignment shifted the
row of a column goes on predicting the next one, and the first column of a block is the autoregressive model's own. A
run that was ended goes on in its folder.

`measure` decodes beginnings of texts that were held out, greedily, and says of each way: tokens per pass, columns per
token, how the model that it was made from judges the text (nats per token), and whether what promises the text of the
model's own autoregressive mode has it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.diffusion import Denoiser
from specjax.diffusion.procedures import procedure_of
from specjax.training import TrainingText, recipe_of, train
from specjax.training.data.packing import pack
from specjax.training.methods import denoisers
from specjax.training.objectives import masked

HELD_OUT = 64  # last texts of the file
PROMPT, NEW = 12, 48  # tokens


def stories(file: str, tokenizer: Any, length: int) -> list[list[int]]:
    """Tokens of the file's texts, which an empty line or <|endoftext|> parts; long ones in several pieces."""
    texts = Path(file).read_text(encoding="utf-8", errors="ignore").replace("<|endoftext|>", "\n\n").split("\n\n")
    tokens = [tokenizer.encode(text.strip()) for text in texts if len(text) > 100]
    return [one[i : i + length] for one in tokens for i in range(0, len(one), length) if len(one) - i > length // 4]


def denoiser_of(args: argparse.Namespace) -> tuple[Denoiser, Any]:
    target, tokenizer = specjax.load(args.model, dtype="float32")
    seeded = args.alignment == "shifted"
    return Denoiser(
        target.model, target.params, args.mask_token, "block_causal", args.block, args.alignment,
        "seed_and_mask" if seeded else "all_masked",
    ), tokenizer  # fmt: skip


def teach(args: argparse.Namespace) -> None:
    pupil, tokenizer = denoiser_of(args)
    pieces = stories(args.texts, tokenizer, args.length)
    lessons = [TrainingText(tuple(one), 1) for one in pieces[:-HELD_OUT]]
    lessons = lessons if args.pieces is None else lessons[: args.pieces]
    epochs = args.epochs
    recipe = recipe_of("masked_diffusion", learning_rate=args.learning_rate, packs=True)
    print(f"{len(lessons)} pieces, {sum(len(text.tokens) for text in lessons)} tokens, {epochs} epochs", flush=True)
    started = time.perf_counter()

    def on_progress(progress) -> None:
        if progress.step % 10 == 0 or progress.step == 1:
            print(f"{progress.step}/{progress.steps} loss {progress.loss:.3f} right {progress.accuracy[0]:.3f} "
                  f"{progress.seconds:.0f} s", flush=True)  # fmt: skip

    trained = train(
        None, pupil, lessons, recipe=recipe, epochs=epochs, rows=args.rows, length=args.length, starts_per_row=1,
        evaluate_every=args.keep, seed=args.seed, folder=args.run, on_progress=on_progress,
    )  # fmt: skip
    about = {name: str(getattr(args, name)) for name in ("epochs", "rows", "length", "learning_rate", "seed")}
    about["seconds"] = f"{time.perf_counter() - started:.0f}"
    denoisers.save_denoiser(args.out, trained, "float32", **about)


def bound(denoiser: Denoiser, pieces: list[list[int]], length: int) -> float:
    """Nats per token of held-out texts at most: the loss that it was trained by, over several draws of masks."""
    (lesson, *_) = pack([TrainingText(tuple(one), 1) for one in pieces], len(pieces), length, one_per_row=True)

    @jax.jit
    def of(denoiser: Denoiser, key: jax.Array) -> jax.Array:
        view = masked.mask_randomly(denoiser, lesson, key)
        return masked.compute_loss(denoiser, lesson, (view, masked.complement(lesson, view)))[0]

    return float(np.mean([of(denoiser, jax.random.key(i)) for i in range(8)]))


def nats(target: specjax.Target, texts: list[list[int]], prompts: int) -> float:
    """Return the mean negative log-likelihood of a token after the prompts, in nats, under an autoregressive model."""
    tokens = jnp.array(texts)
    batch, size = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (batch, size, size))
    cache = target.model.init_cache(target.params, None, batch, 0)
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    output, _ = target.model.forward(target.params, tokens, cache, positions=positions, mask=mask)
    scores = jax.nn.log_softmax(output.logits, -1)[:, :-1]
    reference = jnp.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0]
    return float(-jnp.mean(reference[:, prompts - 1 :]))


def ways(denoiser: Denoiser) -> dict[str, tuple[str, dict[str, Any]]]:
    ways: dict[str, tuple[str, dict[str, Any]]] = {"one a pass": ("sdar", {"remasking": "static"})}
    ways |= {f"sdar, tau {tau}": ("sdar", {"tau": tau}) for tau in (0.85, 0.5)}
    ways["two a pass"] = ("sdar", {"remasking": "static", "steps": max((denoiser.block or 1) // 2, 1)})
    exact = "linear_spec" if denoiser.is_shifted else "s2d2"
    return ways | {exact: (exact, {})}


def measure(args: argparse.Namespace) -> None:
    target, tokenizer = specjax.load(args.model, dtype="float32")
    denoiser = denoisers.load_denoiser(args.weights)
    held_out = stories(args.texts, tokenizer, args.length)[-HELD_OUT:]
    prompts = [one[:PROMPT] for one in held_out if len(one) == args.length]
    options = {"key": 0, "max_new_tokens": NEW}
    record: dict[str, Any] = {"bound": bound(denoiser, held_out, args.length), "ways": {}}
    if denoiser.is_shifted:
        reference = specjax.decode(denoiser.target, None, prompts, **options).to_lists()
    else:
        alone = denoiser.replace(block=1)
        reference = specjax.denoise(alone, "sdar", prompts, **options).to_lists()
    scores = lambda texts: nats(target, [p + t for p, t in zip(prompts, texts, strict=True)], PROMPT)
    plain = specjax.decode(target, None, prompts, **options).to_lists()
    record["texts held out"] = nats(target, [one for one in held_out if len(one) == args.length], PROMPT)
    record["the model it was made from, its own text"] = scores(plain)
    record["its own autoregressive mode"] = scores(reference)
    for name, (method, settings) in ways(denoiser).items():
        result = specjax.denoise(denoiser, procedure_of(method, denoiser, **settings), prompts, **options)
        texts = result.to_lists()
        record["ways"][name] = {
            "tokens_per_pass": float(result.lengths.sum() / result.stats.target_passes.sum()),
            "columns_per_token": float(result.columns.sum() / result.lengths.sum()),
            "nats": scores(texts),
            "rows_equal_to_autoregressive_mode": sum(a == b for a, b in zip(texts, reference, strict=True)),
            "rows": len(prompts),
            "text": tokenizer.decode(prompts[0] + texts[0]),
        }
    print(json.dumps(record, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    learn, weigh = commands.add_parser("train"), commands.add_parser("measure")
    for command in (learn, weigh):
        command.add_argument("model", help="as of specjax.load")
        command.add_argument("--texts", required=True)
        command.add_argument("--length", type=int, default=128)
    learn.add_argument("--block", type=int, default=4)
    learn.add_argument("--alignment", choices=["same", "shifted"], default="shifted")
    learn.add_argument("--mask-token", type=int, default=0, help="a token that no text has; default: <unk>")
    learn.add_argument("--pieces", type=int, help="of the texts, the first; default: all")
    learn.add_argument("--epochs", type=int, default=4)
    learn.add_argument("--rows", type=int, default=16)
    learn.add_argument("--learning-rate", type=float, default=1e-3)
    learn.add_argument("--seed", type=int, default=0)
    learn.add_argument("--keep", type=int, default=100, help="steps between checkpoints")
    learn.add_argument("--run", help="the folder of checkpoints")
    learn.add_argument("--out", required=True)
    learn.set_defaults(do=teach)
    weigh.add_argument("weights")
    weigh.set_defaults(do=measure)
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
