"""Draft heads for targets that read images: tokens per pass with the rows of images kept, compressed and dropped.

    python benchmarks/tiny_scenes.py prompts FOLDER --count 600 --seed 1
    python benchmarks/image_heads.py FOLDER/prompts.jsonl --out docs/image_heads

Every head is trained on the same responses of the target, with the same number of steps. The recipe is that of its kind
without MSD's schedule, with one learning rate for all. Prompts that no head was trained on are then decoded, and all
texts must equal those of plain decoding. It prints the results, and writes OUT.json and OUT.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

import specjax
from specjax.models import images, load_image_processor
from specjax.models.heads.specvlm import EXPERTS
from specjax.training import TrainingSettings, recipe_of, train_drafter
from specjax.training.data.conversation_files import read_text_file
from specjax.training.data.conversations import pictures_of

HEADS = {
    "eagle, placeholders": ("eagle", {}),
    "msd, vectors": ("msd", {}),
    "msd, dropped": ("msd", {"rows": "dropped"}),
    "flash": ("flash", {"block_size": 3}),
    "specvlm, chosen": ("specvlm", {}),
    **{f"specvlm, {expert}": ("specvlm", {"expert": expert}) for expert in EXPERTS},
}
"""The kind of each head, and the changes of its config."""


def measure(target, head, prompts: list, length: int, plain: list | None) -> tuple[float, list]:
    """Return tokens per pass of a greedy chain of three, and the texts.

    Args: prompts: (ids, inputs) of each. head: None: plain decoding. plain: the texts that are expected; None: any.
    """
    drafter = None if head is None else specjax.make_drafter(head.head.kind, target, head, num_tokens=3)
    passes, texts = 0, []
    for ids, inputs in prompts:
        result = specjax.decode(target, drafter, [ids], key=0, max_new_tokens=length, inputs=inputs, eos=1)
        passes += int(result.stats.target_passes.sum())
        texts.append(result.to_lists()[0])
    assert plain is None or texts == plain, "a head changed the text"
    return sum(map(len, texts)) / passes, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="file of prompts with images")
    parser.add_argument("--target", default="tests/data/scenes", help="folder of a model that reads images")
    parser.add_argument("--test", type=int, default=32, help="prompts at the end of the file that are decoded")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--out", type=Path, default=Path("image_heads"))
    args = parser.parse_args()
    target, tokenizer = specjax.load(args.target)
    processor = load_image_processor(args.target, target, tokenizer)
    sources = read_text_file(args.prompts).sources
    prompts = []
    for source in sources[-args.test :]:
        messages = [{"role": "user", "content": source}] if isinstance(source, str) else source
        ids, tiles = processor.chat(messages, pictures_of(messages))
        prompts.append((ids, images(target, [ids], [tiles], num_tiles=1)))
    _, plain = measure(target, None, prompts, args.max_new_tokens, None)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.heads:
            kind, changes = HEADS[name]
            recipe = recipe_of(kind, learning_rate=args.learning_rate)
            if recipe.rising_images:
                recipe = recipe.replace(rising_images=False)
            values = []
            for seed in range(args.seeds):
                settings = TrainingSettings(
                    held_out=8, max_new_tokens=args.max_new_tokens, epochs=args.epochs, rows=args.rows, length=160,
                    evaluate_every=10**6, batch_size=8, seed=seed,
                )  # fmt: skip
                trained = train_drafter(
                    target, tokenizer, kind, sources[: -args.test], folder=Path(folder) / f"{name}{seed}",
                    head_options=changes, recipe=recipe, settings=settings, responses=Path(folder) / "answers",
                    image_processor=processor,
                )  # fmt: skip
                values.append(measure(target, trained.model, prompts, args.max_new_tokens, plain)[0])
            rows.append({"head": name, "per_pass": float(np.mean(values)), "seeds": values})
            print(json.dumps(rows[-1]), flush=True)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args.out.with_suffix(".png"))


def draw(rows: list[dict], path: Path) -> None:
    """Draw tokens per pass by head."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 0.35 * len(rows) + 0.8), layout="constrained")
    names = [row["head"] for row in rows][::-1]
    axes.barh(names, [row["per_pass"] for row in rows][::-1], color="tab:blue")
    axes.set(xlabel="tokens per pass", xlim=(1, None))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
