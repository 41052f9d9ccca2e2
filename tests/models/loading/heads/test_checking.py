"""The self-check of loaded heads: four depths, and the interpretation that mends each kind of error."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from heads import tiny_head
from tiers import those
from toy import markov, tiny_llama

from specjax import Target
from specjax.models import LlamaConfig
from specjax.models.heads.agreement import agreement, read_text
from specjax.models.heads.blocks import abstract_params
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.dflash import DFlash, DFlashConfig, dflash_head
from specjax.models.heads.eagle3 import Eagle3, Eagle3Config, eagle3_head
from specjax.models.loading.heads import LoadedHead, checking
from specjax.models.loading.heads.checking import check_head

V = 7
NEXT = (np.arange(V) + 3) % V
MOVE = np.zeros((V, V), np.float32)
MOVE[NEXT, np.arange(V)] = 1.0  # maps the row of a token to that of the next one
TEXT = [(3 * i) % V for i in range(15)]  # the target's own
LAYER = LlamaConfig(V, V, 1, 2, 1, 8, 8)


def target() -> Target:
    """Return a target that always continues a token with NEXT."""
    rows = np.full((V, V), 1e-6, np.float32)
    rows[np.arange(V), NEXT] = 1.0
    return markov(rows)


def zeros(module, config) -> dict:
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_params(module, config))


def loaded(head, params, **facts) -> LoadedHead:
    return LoadedHead(DraftHead(head, params), "specforge", {}, (), (), 0, (), None, None, **facts)


def eagle3_1(**changes) -> LoadedHead:
    """Return an EAGLE-3 head whose MLP moves to the next token.

    A residual that grows beyond the MLP's output hides it, unless the last norm feeds the states back.
    """
    config = Eagle3Config(layer=LAYER, taps=(2,), target_width=V, vocab_size=V, **changes)
    params = zeros(Eagle3, config)
    mlp = params["first"]["mlp"]
    mlp["gate"]["weight"][:V], mlp["up"]["weight"][:V] = 10 * np.eye(V), np.eye(V)
    mlp["down"]["weight"][:, :V] = MOVE * 8 / (10 * V)
    params["first"]["mlp_norm"]["weight"][:] = params["norm"]["weight"][:] = 1
    params["fc"]["weight"][:] = (np.eye(V) - 1 / V) / 12  # the target's streams are logarithms
    params["head"]["weight"][:] = np.eye(V)
    return loaded(eagle3_head(config), params)


def block(**changes) -> LoadedHead:
    """Return a block drafter with layers that add zero: a slot predicts from its own input, so only the root's can."""
    config = DFlashConfig(LAYER, (1,), V, V, **{"block_size": 4, "mask_token": 0, "own_head": True} | changes)
    params = zeros(DFlash, config)
    params["norm"]["weight"][:] = 1
    params["head"]["weight"][:] = MOVE
    return loaded(dflash_head(config), params)


def test_an_error_of_the_later_drafts_is_found_there():
    right = check_head(eagle3_1(norm_output=True), target(), TEXT)
    assert right.depths == (1.0,) * 4 and right.reason is None
    wrong = check_head(eagle3_1(), target(), TEXT)
    assert wrong.agreement == 1.0 and max(wrong.depths[2:]) == 0.0
    assert "norm_output should be true (with --head-set norm_output=yes they agree at 100%, 100%" in wrong.reason


def test_a_head_whose_first_slot_drafts():
    wrong = check_head(block(), target(), TEXT)
    assert wrong.agreement < 0.2 and len(wrong.depths) == 3
    assert "the slot of the root drafts the first token (with --head-set from_anchor=yes they agree at 100%" in (
        wrong.reason
    )
    right = check_head(block(from_anchor=True), target(), TEXT)
    assert right.agreement == 1.0 and len(right.depths) == 4 and right.reason is None


def test_a_setting_that_the_files_leave_open_is_always_tried(monkeypatch):
    """The right one of two interpretations is kept without a reason."""
    right = eagle3_1(norm_output=True)._replace(assumed=("norm_output",))
    tried = []
    monkeypatch.setattr(checking, "agreement", lambda of, head, text: tried.append(head) or agreement(of, head, text))
    assert check_head(right, target(), TEXT).reason is None
    assert [head.head.config.norm_output for head in tried] == [True, False]


def test_a_head_without_knowledge_may_be_hardly_trained():
    head = eagle3_1()
    nothing = head._replace(head=head.head.replace(params=jax.tree.map(np.zeros_like, head.head.params)))
    assert "or it was hardly trained" in check_head(nothing, target(), TEXT).reason


@pytest.mark.parametrize("kind", those(["medusa"], ["medusa", "hydra", "dflash", "kangaroo"]))
def test_as_many_depths_as_the_head_and_the_text_allow(kind):
    of = tiny_llama()
    head = tiny_head(kind, of)
    longest = head.head.max_depth or 4
    for size in (3, 9):
        tokens = list(range(3, 3 + size))
        assert len(agreement(of, head, read_text(of, tokens, [head]))) == min(4, longest, size - 1)
