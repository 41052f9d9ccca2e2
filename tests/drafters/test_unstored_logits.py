"""Drafts whose logits are too large to be stored: the same drafts and texts, without an array of all logits."""

import dataclasses

import jax
import numpy as np
import pytest
from heads import tiny_head
from tiers import exhaustive
from toy import tiny_llama, tiny_llama_alike

from specjax import decode, trees
from specjax.arrays import logit_rows
from specjax.drafters import two_model
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.models import make_model
from specjax.pallas_kernels.gumbel_topk import by_blocks
from specjax.types import Drafter, Target

PROMPTS, NEW = [[1, 2, 3, 1, 2, 3, 1], [5], list(range(30)), [7, 7]], 14
MIXED = {"key": jax.random.key(5), "temperature": [0.0, 1.5, 0.7, 1.0], "top_p": 0.9}


def renamed(target: Target, name: str) -> Target:
    """A model of its own: programs of another one may be compiled already."""
    return Target(make_model(dataclasses.replace(target.model.config, name=name)), target.params)


def drafter(kind: str, tree: trees.Builder, name: str) -> Drafter:
    if kind == "two_model":
        return two_model(renamed(tiny_llama_alike(), name), tree=tree)
    return head_drafter(tiny_head(kind, tiny_llama()), tree=tree)


CASES = {
    "eagle3, chain": ("eagle3", trees.chain(3)),
}
REPEATED = {
    "two_model, beside the top": ("two_model", trees.branching((3, 2), "top_and_sampled")),
    "medusa, likeliest": ("medusa", trees.branching((3, 2), "point_mass")),
    "dspark, stop": ("dspark", trees.chain(3, stop=trees.stops.drafter_confidence(0.4))),
    "two_model, rsd_s": ("two_model", trees.beam(3, 3)),
    "medusa, rsd_c": ("medusa", trees.branching("2x2x1")),
    "dflash, chain": ("dflash", trees.chain(3)),
    "dflash2, chain": ("dflash2", trees.chain(3)),
    "domino, chain": ("domino", trees.chain(3)),
    "p_eagle, chain": ("p_eagle", trees.chain(3)),
    "hidden_transfer, chain": ("hidden_transfer", trees.chain(3)),
    "two_model, paths": ("two_model", trees.independent_paths(2, 3)),
    "two_model, uniform": ("two_model", trees.branching((3, 2), "without_replacement_then_uniform")),
    "two_model, dyspec": ("two_model", trees.dyspec(threshold=0.05, width=4, depth=3, children=3)),
    "two_model, dyspec_fixed": ("two_model", trees.dyspec_fixed(5)),
    "two_model, eagle2": ("two_model", trees.eagle2(top_k=3, depth=3, total=8)),
    "two_model, siblings": ("two_model", trees.chain_with_siblings(3)),
    "two_model, bild": ("two_model", trees.bild(4, 0.1)),
}


@pytest.mark.parametrize("case", [*CASES, *map(exhaustive, REPEATED)])
def test_the_text_is_that_of_stored_logits(case, monkeypatch):
    kind, tree = (CASES | REPEATED)[case]
    texts = []
    for limit in (1 << 28, 0):
        monkeypatch.setattr(logit_rows, "LARGE_LOGITS", limit)
        monkeypatch.setattr(logit_rows, "GROUP_BYTES", 4 * len(PROMPTS) * 64 * 2)  # groups of two nodes
        name = f"{case} {limit}"
        run = decode(renamed(tiny_llama(), name), drafter(kind, tree, name), PROMPTS, max_new_tokens=NEW, **MIXED)
        texts.append((run.to_lists(), int(run.stats.accepted.sum())))
    assert texts[0] == texts[1]
    assert texts[0][1] > 0 or kind != "two_model"  # an untrained head is seldom right


def most_rows(kind: str, tree: trees.Builder, name: str) -> int:
    """Return the most rows of a vocabulary in an array of the compiled sampled step of a batch of four."""
    model = renamed(tiny_llama(vocab=80), name)
    draft = renamed(tiny_llama(vocab=80, layers=1), name)
    draft = two_model(draft, tree=tree) if kind == "two_model" else head_drafter(tiny_head(kind, model), tree=tree)
    job = prepare(model, draft, PROMPTS, Settings(temperature=1.0), key=0, max_new_tokens=NEW)
    text = step.lower(job.parts, jax.eval_shape(start, job)).compile().as_text()
    shapes = (shape.split("]")[0].split(",") for shape in text.split("f32[")[1:])
    return max(int(np.prod([int(x) for x in shape[:-1]])) for shape in shapes if shape[-1] == "80")


@pytest.mark.parametrize("kind", ["medusa", *map(exhaustive, ("dflash", "eagle3", "two_model"))])
def test_a_step_has_the_logits_of_one_node_at_a_time(kind, monkeypatch):
    tree = trees.chain(3)
    monkeypatch.setattr(logit_rows, "GROUP_BYTES", 0)
    monkeypatch.setattr(logit_rows, "LARGE_LOGITS", 1 << 28)
    assert most_rows(kind, tree, f"{kind} stored") >= len(PROMPTS) * tree.max_depth
    monkeypatch.setattr(logit_rows, "LARGE_LOGITS", 0)
    monkeypatch.setattr(by_blocks, "BLOCK_BYTES", 0)
    monkeypatch.setattr(by_blocks, "MIN_BLOCK", 16)
    assert most_rows(kind, tree, f"{kind} unstored") == len(PROMPTS)
