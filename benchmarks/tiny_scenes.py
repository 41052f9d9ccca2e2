"""A tiny model in the form of SmolVLM that answers questions about scenes of coloured shapes.

    python benchmarks/tiny_scenes.py train tests/data/scenes
    python benchmarks/tiny_scenes.py measure tests/data/scenes
    python benchmarks/tiny_scenes.py prompts build/scenes --count 200 --seed 7

Scenes and questions are those of `toy_tasks.scenes`. A training row has the image of a scene once, and all its
questions are branches of a tree behind it. `measure` answers questions about other scenes with the image, with the
image of another scene, and without an image. `prompts` writes images and a file of messages for other programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tiny_hybrid import rounded
from toy_tasks import scenes
from toy_tasks.scenes import IMAGE_KINDS, TEXT_KINDS, Question

import specjax
from specjax.models import LlamaConfig, images, init_params, load_image_processor, make_model
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.models.vision.config import ConnectorSizes, TowerSizes, VisionLanguageConfig
from specjax.models.vision.grids import UNUSED
from specjax.models.vision.memory import Images
from specjax.training import recipe_of
from specjax.training.loop.optimizers import make_optimizer

START, END, IMAGE, BORDER, GLOBAL, UNKNOWN = CONTROL = (
    "<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", "<unk>"
)  # fmt: skip
VOCABULARY = (*CONTROL, "system", "user", "assistant", *scenes.WORDS)
TEMPLATE = (
    START + "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %} {{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance> {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_image_splitting": False,
    "do_resize": True, "size": {"longest_edge": scenes.SIZE}, "max_image_size": {"longest_edge": scenes.SIZE},
    "resample": 1, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "do_pad": True,
}  # fmt: skip
CELL_WORDS = ("nothing", *scenes.COLOURS), ("nothing", *scenes.SHAPES), scenes.NUMBERS[1 : scenes.SIDE + 1]
"""The words for a cell of an image: its colour, its shape and the number of its row."""
LENGTH = 192
"""Tokens of a training row."""
NEW = 72
"""Tokens of an answer, at most."""
CLEARER = 4.0
"""A factor on the random positions of patches, so that the places of shapes are learnt early."""
HELD_OUT = 1_000_000
"""The seeds of scenes to measure begin here."""


def config() -> VisionLanguageConfig:
    """Return the shapes. A vector of an image has the patches of one cell of the grid."""
    text = LlamaConfig(
        vocab_size=len(VOCABULARY), width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_width=160,
        norm_eps=1e-5, rope_base=10_000.0, max_positions=512, tied=True, name="tiny-scenes",
    )  # fmt: skip
    return VisionLanguageConfig.around(
        text,
        tower=TowerSizes(
            width=48, num_layers=2, num_heads=3, mlp_width=96, image_size=scenes.SIZE, patch_size=scenes.CELL // 2
        ),
        connector=ConnectorSizes(shuffle=2, bias=False),
        image_token=VOCABULARY.index(IMAGE),
    )


def untrained(seed: int) -> specjax.Target:
    """Return the model with random parameters."""
    params: Any = init_params(config(), jax.random.key(seed))
    params["tower"]["positions"]["table"] *= CLEARER
    return specjax.Target(make_model(config()), params)


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with an id for each word."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, UNKNOWN))
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # The unknown word is not special, because chats refuse names of fields that contain special tokens.
    backend.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in CONTROL if word != UNKNOWN])
    names = {"bos_token": START, "eos_token": END, "pad_token": END}
    return Tokenizer(LibraryCodec(backend), VOCABULARY, (VOCABULARY.index(END),), TEMPLATE, names)


def write(folder: Path, target: specjax.Target) -> None:
    """Write a model in bfloat16 with its tokenizer and the settings of its image processor."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params)
    model = make_model(dataclasses.replace(config(), dtype="bfloat16"))
    specjax.save_model(folder, specjax.Target(model, narrow), tokenizer())
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": config().vectors_per_tile}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n")


class Batch(NamedTuple):
    """Training rows. The questions of a row follow its image and do not see each other."""

    tokens: Any  # int32[B, LENGTH]
    positions: Any  # int32[B, LENGTH]
    branches: Any  # int32[B, LENGTH]; 0: the image, which all branches see; -1: padding
    is_answer: Any  # bool[B, LENGTH], the tokens whose successors are trained
    pixels: Any  # uint8[B, 64, 64, 3]
    has_image: Any  # bool[B]
    cells: Any  # int32[B, 16, 3], the words of each cell, as indices into those of `CELL_WORDS`


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, special=False)


def draw_batch(rows: int, rng: np.random.Generator, easy: float) -> Batch:
    """Return rows of random scenes. One row in eight has questions without an image.

    easy: the share of images whose first question is to read the grid, which is the easiest one.
    """
    shape, size = (rows, LENGTH), scenes.SIZE
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    branches, is_answer = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    pixels, has_image = np.zeros((rows, size, size, 3), np.uint8), np.arange(rows) % 8 > 0
    cells = np.zeros((rows, scenes.SIDE**2, 3), np.int32)
    cells[..., 2] = np.arange(scenes.SIDE**2) // scenes.SIDE
    image = encode(BORDER + GLOBAL + IMAGE * config().vectors_per_tile + BORDER)
    for row in range(rows):
        scene = scenes.make_scene(rng)
        prefix = encode(f"{START}user:")
        kinds = [*TEXT_KINDS]
        if has_image[row]:
            prefix, kinds = prefix + image, [*IMAGE_KINDS]
            pixels[row] = scenes.draw(scene, rng)
            for shape in scene:
                cell = (shape.row - 1) * scenes.SIDE + shape.column - 1
                cells[row, cell, :2] = [CELL_WORDS[0].index(shape.colour), CELL_WORDS[1].index(shape.form)]
        end = len(prefix)
        tokens[row, :end], positions[row, :end], branches[row, :end] = prefix, np.arange(end), 0
        for branch in range(1, LENGTH):
            kind = str(rng.choice(kinds))
            if branch == 1 and has_image[row] and rng.random() < easy:
                kind = "read"
            question = scenes.ask(kind, scene, rng)
            text, answer = encode(f"{question.text}{END}assistant:"), encode(question.answer + END)
            stop = end + len(text) + len(answer)
            if stop > LENGTH:
                break
            tokens[row, end:stop], branches[row, end:stop] = text + answer, branch
            positions[row, end:stop] = len(prefix) + np.arange(stop - end)
            is_answer[row, end + len(text) - 1 : stop - 1] = True
            end = stop
    return Batch(tokens, positions, branches, is_answer, pixels, has_image, cells)


def loss(params: Any, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the loss of a step, the share of right words in answers, and the share of right words of cells.

    The loss is that of the words of answers and of the words for the cells of images. A vector's product with the
    embedding of a word is the logit of this word. Without the second part, the text model learns to ignore the tower.
    """
    rows, side = len(batch.tokens), config().tower.side
    model = make_model(config())
    pixels = (batch.pixels.transpose(0, 3, 1, 2)[:, None] / 127.5 - 1).astype(jnp.float32)
    patches = jnp.broadcast_to(batch.has_image[:, None, None, None], (rows, 1, side, side))
    first = len(encode(f"{START}user:{BORDER}{GLOBAL}"))
    places = jnp.where(batch.has_image[:, None], first + jnp.arange(config().vectors_per_tile), UNUSED)
    cache = model.init_cache(params, Images(pixels, patches, places), rows, 1)  # the pass adds nothing to it
    cache = cache._replace(text=jax.lax.optimization_barrier(cache.text))  # XLA would compute much with its zeros
    parent, node = batch.branches[:, None, :], batch.branches[:, :, None]
    mask = jnp.tril((parent == 0) | (parent == node))
    output, _ = model.forward(params, batch.tokens, cache, positions=batch.positions, mask=mask)
    value, right = _entropy(output.logits[:, :-1], batch.tokens[:, 1:], batch.is_answer[:, :-1])
    of_cells = []
    for part, words in enumerate(CELL_WORDS):
        table = params["embed"]["weight"][np.array([VOCABULARY.index(word) for word in words])]
        of_cells.append(_entropy(cache.memory.vectors @ table.T, batch.cells[..., part], batch.has_image[:, None]))
    cell_losses, cell_shares = zip(*of_cells, strict=True)
    return value + sum(cell_losses) / 2, (right, sum(cell_shares) / len(CELL_WORDS))


def _entropy(logits: jax.Array, labels: Any, use: Any) -> tuple[jax.Array, jax.Array]:
    """Return the mean cross entropy where `use` is True, and the share of labels that are most likely."""
    share = jnp.broadcast_to(use, labels.shape) / jnp.sum(jnp.broadcast_to(use, labels.shape))
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(each * share), jnp.sum((jnp.argmax(logits, -1) == labels) * share)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnums=(0, 1))
def step(params: Any, state: Any, batch: Batch, optimizer: Any) -> tuple[Any, Any, jax.Array, Any]:
    """Return parameters and optimizer state after a step, its loss, and the shares of right words."""
    (value, right), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value, right


def train(target: specjax.Target, steps: int, rows: int, seed: int, easy: float, rate: float) -> specjax.Target:
    """Return the trained model. In the first `easy` of the steps, most images are read cell by cell."""
    recipe = recipe_of("fastdraft_pretraining", optimizer="muon", learning_rate=rate, tables=0.3)
    optimizer = make_optimizer(recipe, steps)
    rng, params, start = np.random.default_rng(seed + 1), target.params, time.perf_counter()
    state = optimizer.init(params)
    for number in range(1, steps + 1):
        batch = draw_batch(rows, rng, 0.75 if number <= easy * steps else 0.0)
        params, state, value, right = step(params, state, batch, optimizer)
        if number % 25 == 0 or number == 1:
            seconds = time.perf_counter() - start
            shares = f"right {right[0]:.3f}, of cells {right[1]:.3f}"
            print(f"{number}/{steps} loss {value:.3f} {shares} {seconds:.0f} s", flush=True)
    return specjax.Target(target.model, params)


class Answers(NamedTuple):
    """Questions about scenes, and the greedy answers to them."""

    questions: list[Question]
    texts: list[str]
    tokens_per_pass: float

    @property
    def right(self) -> float:
        """Return the share of the answers that are right to the word."""
        return float(np.mean([text == q.answer for text, q in zip(self.texts, self.questions, strict=True)]))


def answer(
    target: specjax.Target, processor: Any, kinds: Sequence[str], count: int, seed: int, view: str = "image",
    method: str = "autoregressive",
) -> Answers:  # fmt: skip
    """Answer a question about each of `count` scenes. Its kind is the next of `kinds`.

    Args:
      view: "image"; "other", the image of another scene; or "none".
    """
    import PIL.Image

    rng = np.random.default_rng(seed)
    pairs = [(scene, scenes.draw(scene, rng)) for scene in (scenes.make_scene(rng) for _ in range(count))]
    questions = [scenes.ask(kinds[i % len(kinds)], scene, rng) for i, (scene, _) in enumerate(pairs)]
    pictures = [PIL.Image.fromarray(image) for _, image in pairs]
    pictures = {"image": pictures, "other": [*pictures[1:], pictures[0]], "none": []}[view]
    rows = [processor.chat(question.text, pictures[i : i + 1]) for i, question in enumerate(questions)]
    ids, tiles = ([row[part] for row in rows] for part in range(2))
    result = specjax.decode(
        target, method, ids, key=0, inputs=images(target, ids, tiles), max_new_tokens=NEW, eos=tokenizer().eos
    )
    passes = float(np.sum(result.lengths) / np.sum(result.stats.target_passes))
    return Answers(questions, [tokenizer().decode(text) for text in result.to_lists()], passes)


def measure(folder: Path, count: int, seed: int) -> None:
    """Print the share of right answers of each kind, and a wrong one."""
    target, words = specjax.load(folder)
    processor = load_image_processor(folder, target, words)
    for kind in (*IMAGE_KINDS, *TEXT_KINDS):
        views = ("image", "other", "none") if kind in IMAGE_KINDS else ("none",)
        answers = {view: answer(target, processor, [kind], count, seed, view) for view in views}
        tokens = np.mean([len(encode(question.answer)) for question in answers["none"].questions])
        print(kind, f"{tokens:.0f} tokens", {view: answers[view].right for view in views}, flush=True)
        first = answers[views[0]]
        wrong = [(text, q) for text, q in zip(first.texts, first.questions, strict=True) if text != q.answer]
        for text, question in wrong[:1]:
            print(f"  {question.text}\n  right: {question.answer}\n  wrong: {text}", flush=True)


def write_prompts(folder: Path, count: int, seed: int, kinds: Sequence[str]) -> None:
    """Write questions of these kinds in turn, and the image of each scene, as messages with paths."""
    import PIL.Image

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        scene, kind = scenes.make_scene(rng), kinds[number % len(kinds)]
        question, content = scenes.ask(kind, scene, rng), []
        if kind in IMAGE_KINDS:
            name = f"scene_{number:03d}.png"
            PIL.Image.fromarray(scenes.draw(scene, rng)).save(folder / name)
            content = [{"type": "image", "path": name}]
        turn = {"role": "user", "content": [*content, {"type": "text", "text": question.text}]}
        lines.append(json.dumps({"category": kind, "messages": [turn], "answer": question.answer}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sub = {name: commands.add_parser(name) for name in ("train", "measure", "prompts")}
    for command in sub.values():
        command.add_argument("folder", type=Path)
        command.add_argument("--seed", type=int, default=0)
    sub["train"].add_argument("--steps", type=int, default=800)
    sub["train"].add_argument("--start", type=Path, help="folder of a model whose training continues")
    sub["train"].add_argument("--rows", type=int, default=16)
    sub["train"].add_argument("--rate", type=float, default=1e-2, help="highest learning rate")
    sub["train"].add_argument("--easy", type=float, default=0.3, help="share of the steps with easier questions")
    for name in ("measure", "prompts"):
        sub[name].add_argument("--count", type=int, default=100, help="scenes")
    sub["prompts"].add_argument("--kinds", choices=("image", "text", "mixed"), default="image")
    args = parser.parse_args()
    if args.command == "train":
        first = untrained(args.seed) if args.start is None else specjax.load(args.start, dtype="float32")[0]
        target = train(first, args.steps, args.rows, args.seed, args.easy, args.rate)
        write(args.folder, rounded(target))
    elif args.command == "measure":
        measure(args.folder, args.count, args.seed + HELD_OUT)
    else:
        names = {"image": [*IMAGE_KINDS], "text": [*TEXT_KINDS], "mixed": [*IMAGE_KINDS, *TEXT_KINDS]}
        write_prompts(args.folder, args.count, args.seed, names[args.kinds])


if __name__ == "__main__":
    main()
