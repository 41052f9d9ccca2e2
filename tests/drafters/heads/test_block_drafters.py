"""Block drafters that predict their target exactly: one pass drafts the right token at every depth."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from heads import layer_of
from tiers import exhaustive
from toy import markov

from specjax import UsageError, decode, make_drafter, trees
from specjax.drafters.heads import sized_trees
from specjax.models.heads import blocks
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.kinds import KINDS
from specjax.models.heads.p_eagle import PEagleConfig
from specjax.trees import stops

VOCAB, SHIFT = 7, 3
FOLLOWING = (np.arange(VOCAB) + SHIFT) % VOCAB  # all texts repeat themselves after 7 tokens
MOVE = np.zeros((VOCAB, VOCAB), np.float32)
MOVE[FOLLOWING, np.arange(VOCAB)] = 30.0


def target():
    rows = np.full((VOCAB, VOCAB), 1e-6, np.float32)
    rows[np.arange(VOCAB), FOLLOWING] = 1.0
    return markov(rows)


def silent(kind, config):
    """Return parameters of a head with layers that add zero, and with zero logits if it has its own output layer."""
    params = jax.tree.map(np.array, blocks.init_params(KINDS[kind].module, config, jax.random.key(0)))
    layers = params["layers"].values() if "layers" in params else [params["first"]]
    for layer in layers:
        layer["attention"]["o"]["weight"][:] = 0
        layer["mlp"]["down"]["weight"][:] = 0
    params["head"]["weight"][:] = 0
    return params


def by_token(kind, **parts) -> DraftHead:
    """Return a head with a correction that predicts the token after each token."""
    config = DFlashConfig(layer_of(target()), (2,), VOCAB, VOCAB, 4, VOCAB - 1, own_head=True, **parts)
    params = silent(kind, config)
    if kind == "dspark":
        params["markov"]["w1"]["weight"], params["markov"]["w2"]["weight"] = np.eye(VOCAB, dtype=np.float32), MOVE
        params["confidence"]["proj"]["weight"][:] = 0
        params["confidence"]["proj"]["bias"][:] = 1
        params["confidence"]["temperatures"][2:] = 100.0  # sigmoid(1) in the first two slots, then about 1 / 2
    else:
        part = params["selector"]
        part["predecessor"]["weight"], part["successor"]["weight"] = np.eye(VOCAB, dtype=np.float32), MOVE
        part["projection"]["weight"] = np.full((VOCAB, VOCAB), VOCAB**-0.5, np.float32)  # 1 of any mask
    return DraftHead(KINDS[kind].head(config), params)


def by_position(kind) -> DraftHead:
    """Return a head in which each slot attends to the same token a fixed number of positions back."""
    layer = layer_of(target(), num_heads=1)
    if kind == "dflash":  # the slot of x_p finds f_{p-8}, which says x_{p-7}
        config, back = DFlashConfig(layer, (2,), VOCAB, VOCAB, 4, VOCAB - 1, own_head=True), 8
    else:  # the slot at p says x_{p+2} and finds the pair at p - 6, which holds x_{p-5}
        config, back = PEagleConfig(layer, (2,), VOCAB, VOCAB, mask_token=VOCAB - 1, depths=3), 6
    params = silent(kind, config)
    params["head"]["weight"][:] = 30 * np.eye(VOCAB)
    if kind == "dflash":
        params["fc"]["weight"][:] = np.eye(VOCAB)  # streams are log probabilities: 0 of what follows, else -13.8
        attention, mask = params["layers"][0]["attention"], np.eye(VOCAB)
    else:
        params["fc"]["weight"][:] = 0  # the state of all pairs
        attention, mask = params["first"]["attention"], np.eye(VOCAB, 2 * VOCAB)  # the embedding
    # Of all tokens one query and, of all that is committed, one key; turned so that they meet `back` positions apart.
    size = mask.shape[1] // VOCAB * VOCAB
    same = np.concatenate([np.ones(VOCAB), np.zeros(size - VOCAB)])
    angle = -back / 10000.0 ** (np.arange(4) / 4)
    sign = -1 if kind == "dflash" else 1  # of the sum of what a key is made of
    attention["q"]["weight"][:] = 100 * np.outer(np.concatenate([np.cos(angle), np.sin(angle)]), same)
    attention["k"]["weight"][:] = sign * np.outer(np.arange(8) < 4, same)
    attention["v"]["weight"][:] = np.eye(8, VOCAB) @ mask
    attention["o"]["weight"][:] = 1000 * np.eye(VOCAB, 8)  # beside it the embedding of the slot is nothing
    return DraftHead(KINDS[kind].head(config), params)


HEADS = {
    "dflash": lambda: by_position("dflash"),
    "dspark": lambda: by_token("dspark", from_anchor=True, markov="vanilla", markov_rank=VOCAB, confidence="state"),
    "dflash2": lambda: by_token("dflash2", selector_rank=VOCAB, candidates=VOCAB),
    "p_eagle": lambda: by_position("p_eagle"),
}


@pytest.mark.parametrize(
    ("kind", "options", "accepted"),
    [
        ("dflash", {}, 3),
        ("dspark", {"stop": stops.drafter_confidence(0.6)}, 2),  # a third would be right, too, but the head is not sure
        ("p_eagle", {}, 3),
        ("dspark", {"stop": stops.budget(), "costs": (1.0, 1.1, 1.2, 9.0, 9.0)}, 2),
        exhaustive("dspark", {"stop": stops.budget(), "costs": (1.0,) * 5}, 4),
        exhaustive("dspark", {}, 4),
        exhaustive("dspark", {"stop": stops.acceptance(0.5, lag=False, predict=stops.read_confidence)}, 3),  # keeps it
        exhaustive("dflash2", {}, 3),
    ],
)
def test_a_block_of_a_head_that_knows_the_target_is_right(kind, options, accepted):
    text = (np.arange(30) * SHIFT % VOCAB).tolist()
    prompts = [text[:9], text[2:16]]
    result = decode(target(), make_drafter(kind, target(), HEADS[kind](), **options), prompts, key=0, max_new_tokens=13)
    assert result.to_lists() == [text[9:22], text[16:29]]
    assert result.stats.target_passes.tolist() == [-(-13 // (accepted + 1))] * 2


def test_a_head_without_confidence_has_no_rule_of_its_own():
    drafter = make_drafter("dflash", target(), HEADS["dflash"](), stop=stops.drafter_confidence())
    with pytest.raises(UsageError, match="own:P and budget need a drafter with a confidence head"):
        decode(target(), drafter, [[1, 2]], key=0, max_new_tokens=2)


def test_a_tree_deeper_than_the_block_is_refused():
    with pytest.raises(UsageError, match="the tree is 4 tokens deep, but the head drafts only 3"):
        make_drafter("dflash", target(), HEADS["dflash"](), num_tokens=4)


@pytest.mark.parametrize(("costs", "passes"), [((1.0, 1.1, 1.2, 1.3), 4), ((1.0, 9.0, 9.0, 9.0), 13)])
def test_texts_are_unchanged_and_costs_choose_the_size(costs, passes, monkeypatch):
    monkeypatch.setattr(sized_trees.costs_of, "of_head", lambda *arguments: 0.1)
    drafter = make_drafter("dflash", target(), HEADS["dflash"](), tree=trees.parse("ddtree:auto"), costs=costs)
    text = (np.arange(30) * SHIFT % VOCAB).tolist()
    result = decode(target(), drafter, [text[:9], text[2:16]], key=0, max_new_tokens=13)
    assert result.to_lists() == [text[9:22], text[16:29]]
    assert result.stats.target_passes.tolist() == [passes] * 2
