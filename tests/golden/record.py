"""Texts of every method, rule, tree and loop on tiny models: python tests/golden/record.py OUT.json

With seeds, prompts and keys fixed here: each method greedy, sampled and with shared noise on a ragged batch, two models
under every rule and tree, `serve`, runs that were interrupted, and PEARL. `texts.json` was recorded before the engine
and its contracts were rewritten; `test_texts.py` compares.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))

from quick_compile import flags

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = flags(devices=2)

import jax
import numpy as np
from toy import tiny_datastore, tiny_llama, tiny_llama_alike

import specjax
from specjax import decode, make_drafter, serve, stream, trees, verifiers
from specjax.persistence import Checkpoints

PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7, 7]]
OPTIONS = {
    "auto": {"widths": (1, 3, 6), "costs": (1.0, 1.1, 1.2), "num_recycled": 7},
    "autoregressive": {},
    "choice": {"num_nodes": 4, "depths": (2,)},
    "dynamic_exit": {"num_tokens": 4},
    "early_exit": {"exit_layer": 1, "num_tokens": 3},
    "easyspec": {"num_tokens": 3, "group": 2},
    "aded": {"num_nodes": 7, "depth": 3, "buckets": 8},
    "hierarchical": {"min_tokens": 3},
    "input_guided": {"num_tokens": 6},
    "jacobi": {"window": 4},
    "lookahead": {"ngram": 3, "window": 3, "guesses": 2, "buckets": 16},
    "prompt_lookup": {"num_tokens": 4},
    "rasd": {"tree": "top:2x1"},
    "suffix": {"num_tokens": 5},
    "rapid": {"num_tokens": 3, "budget": 12, "chunk": 4, "query": 3, "max_new_tokens": 20},
    "rest": {"num_nodes": 7, "depth": 4, "max_span": 4, "num_paths": 8},
    "superposed": {"exit_layer": 1, "num_tokens": 3, "drafts": 2},
    "swift": {"num_tokens": 4, "layers": (0, 1), "ratio": 0.5, "window": 4, "stop": 0.1},
    "stand": {"tree": ((0,), (1,), (0, 0)), "buckets": 4, "read_prompt": False},
    "token_recycling": {"num_nodes": 7},
    "two_model": {"num_tokens": 3},
}
SETTINGS = {
    "greedy": {"temperature": 0.0, "eos": (27, 12)},
    "sampled": {"temperature": 0.8, "top_k": 20},
    "coupled": {"temperature": 0.8, "sampling": "coupled"},
}
SERVED = "autoregressive", "auto", "two_model", "token_recycling", "lookahead"
RULES = [  # (tree, rule)
    ("1x1x1", "standard"), ("1x1x1", "block"), ("1x1x1", "traversal"), ("2x2", "recursive_rejection"),
    ("paths:2x2", "specinfer"), ("paths:2x2", "spectr"), ("paths:2x2", "multipath_block"),
    ("mixed:2x1", "greedy_multi_draft"), ("2x2", "traversal"), ("beam:3x2", "recursive_rejection"),
    ("dyspec:3x2", "recursive_rejection"), ("eagle2:2x2x4", "sample_and_match"), ("1x1x1", "typical"),
    ("1x1x1", "rollback"),
]  # fmt: skip


def drafter_of(name: str):
    """A method as the record has it."""
    options = dict(OPTIONS[name])
    if name == "rest":
        options["datastore"] = tiny_datastore(64)
    draft = tiny_llama(seed=1, layers=5) if name == "easyspec" else tiny_llama_alike()
    return make_drafter(name, tiny_llama(), draft, **options)


def of_methods():
    for name, (setting, options) in itertools.product(sorted(OPTIONS), SETTINGS.items()):
        result = decode(
            tiny_llama(), drafter_of(name), PROMPTS, key=jax.random.key(0), max_new_tokens=24, **options
        )  # fmt: skip
        yield f"{name} {setting}", result.to_lists(), result.stats.target_passes


def of_rules():
    rules = {**verifiers.VERIFIERS, "multipath_block": verifiers.multipath_block(2)}
    for tree, rule in RULES:
        drafter = specjax.drafters.two_model(tiny_llama_alike(), tree=trees.parse(tree))
        result = decode(
            tiny_llama(), drafter, PROMPTS, key=jax.random.key(0), max_new_tokens=16, temperature=0.8,
            verifier=rules[rule],
        )  # fmt: skip
        yield f"{tree} {rule}", result.to_lists(), result.stats.target_passes


def of_serve():
    prompts = [*PROMPTS, [9, 8, 9], [3]]
    for name, temperature in itertools.product(SERVED, (0.0, 0.8)):
        texts: list[list[int]] = [[] for _ in prompts]
        requests = (
            specjax.Request(prompt, jax.random.key(i), 6 + 3 * i) for i, prompt in enumerate(prompts)
        )  # fmt: skip
        for news in serve(
            tiny_llama(), drafter_of(name), requests, slots=2, longest_prompt=32, max_new_tokens=24,
            temperature=temperature,
        ):  # fmt: skip
            texts[news.request] += news.tokens
        yield f"serve {name} {temperature}", texts, 0


def of_resume():
    for name in ("token_recycling", "two_model"):
        with tempfile.TemporaryDirectory() as folder:
            run = lambda name=name, folder=folder: stream(
                tiny_llama(), drafter_of(name), PROMPTS, checkpoint=Checkpoints(folder, every=2),
                key=jax.random.key(0), max_new_tokens=20, temperature=0.8,
            )  # fmt: skip
            first = run()
            for _ in range(5):
                next(first)
            first.close()
            texts: list[list[int]] = [[] for _ in PROMPTS]
            for step in run():
                for row, new in zip(texts, step.tokens, strict=True):
                    row += new
        yield f"resume {name}", texts, 0


def of_loops():
    draft = tiny_llama_alike()
    draft = specjax.Target(draft.model, jax.device_put(draft.params, jax.devices()[1]))
    for temperature in (0.0, 0.8):
        result = specjax.decoders.pearl(
            tiny_llama(), draft, PROMPTS, key=jax.random.key(0), max_new_tokens=16, temperature=temperature,
            num_tokens=3,
        )  # fmt: skip
        yield f"pearl {temperature}", result.to_lists(), 0


PARTS = of_methods, of_rules, of_serve, of_resume, of_loops


def main(out: str) -> None:
    record, start = {}, time.time()
    for part in PARTS:
        for name, texts, passes in part():
            record[name] = {"texts": texts, "passes": np.asarray(passes).tolist()}
            print(f"{time.time() - start:6.0f} s  {name}", flush=True)
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(texts)}" for name, texts in record.items())
        pathlib.Path(out).write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1])
