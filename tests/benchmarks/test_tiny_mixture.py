"""The tiny trained mixture that comes with the tests: its routing is in use, and its module drafts with experts."""

import functools

import jax
import numpy as np
import pytest
import tiny_hybrid
import tiny_mixture
from shipped_hybrid import NEW, TEXTS
from shipped_mixture import FOLDER, mixture_module, shipped_mixture
from tiers import those

import specjax
from specjax import costs, trees
from specjax.catalog.defaults import NATIVE, defaults
from specjax.drafters.combined.auto import DRAFTING
from specjax.models.heads.agreement import agreement, read_text
from specjax.models.loading.heads import read_head
from specjax.models.loading.heads.checking import check_head
from specjax.parallel.expert_traces import trace_experts


@functools.cache
def prompts():
    return [tiny_hybrid.tokenizer().encode(text) for text in TEXTS]


@functools.cache
def plain(temperature=None):
    options = {} if temperature is None else {"temperature": temperature, "sampling": "coupled"}
    return specjax.decode(
        shipped_mixture(), "autoregressive", prompts(), key=0, max_new_tokens=NEW, **options
    ).to_lists()  # fmt: skip


def test_the_files_are_small_and_their_model_is_that_of_the_benchmark():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_300_000
    target, tokenizer = specjax.load(FOLDER, dtype="bfloat16")
    assert target.native.dialect == "deepseek" and tokenizer.encode(TEXTS[0]) == prompts()[0]
    assert target.model.config.experts == tiny_mixture.SIZES
    shapes = jax.eval_shape(tiny_mixture.untrained, 0).params
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, target.params)


def test_routing_is_in_use_and_neighbours_share_experts():
    """Most experts read some token. Eight tokens of a text choose fewer experts than independent rows would."""
    experts = trace_experts(shipped_mixture(), [tiny_mixture.texts(1, seed=99)[0].tokens[:64]], window=64).experts
    assert experts.shape[0] == 3 and experts.shape[2] == tiny_mixture.CHOSEN
    for layer in experts:
        assert len(np.unique(layer)) >= 12
        distinct = np.mean([len(np.unique(layer[start : start + 8])) for start in range(0, 64, 8)])
        assert tiny_mixture.CHOSEN < distinct < tiny_mixture.SIZES.expected_experts(8)


def test_the_model_and_its_module_know_their_stories():
    ids = tiny_mixture.texts(1, seed=99)[0].tokens
    text = read_text(shipped_mixture(), ids, [mixture_module()])
    assert (np.asarray(text.best)[:-1] == np.asarray(ids[1:])).mean() > 0.7
    shares = agreement(shipped_mixture(), mixture_module(), text, depths=3)
    assert min(shares) > 0.5 and shares[0] > 0.7, shares
    assert check_head(read_head(NATIVE, shipped_mixture()), shipped_mixture(), ids).reason is None


DRAFTS = {
    "default": None,
    "auto with the module": "auto",
    "chain": "mtp",
    "tree": "mtp",
    "auto": "auto",
    "suffix": "suffix",
}


@pytest.mark.parametrize("name", those({"default", "auto with the module"}, list(DRAFTS)))
@pytest.mark.parametrize("temperature", those({None}, [None, 0.7]))
def test_drafted_texts_are_those_of_plain_decoding(name, temperature):
    target, method = shipped_mixture(), DRAFTS[name]
    options = {"tree": trees.parse("top:4x2x1")} if name == "tree" else {"num_tokens": 3} if name == "chain" else {}
    if name == "auto with the module":
        options = {"draft_cost": DRAFTING, "head_cost": DRAFTING}  # by default drafts pause in a model so small
    head = (mixture_module(),) if method == "mtp" or "module" in name else ()
    drafter = None if method is None else specjax.make_drafter(method, target, *head, **options)
    assert defaults(target, None, "cpu").head == NATIVE
    sampling = {} if temperature is None else {"temperature": temperature, "sampling": "coupled"}
    result = specjax.decode(target, drafter, prompts(), key=0, max_new_tokens=NEW, **sampling)
    assert result.to_lists() == plain(temperature)
    if temperature is None and name in ("auto with the module", "chain", "tree"):
        # `auto` knows that wide passes read more experts, so it drafts less.
        bound = 1.2 if method == "auto" else 1.5
        assert np.sum(result.lengths) / np.sum(result.stats.target_passes) > bound


def test_estimated_costs_grow_with_the_experts_of_a_pass():
    """A dense model of the size that reads a token has the costs of its products alone."""
    target = shipped_mixture()
    ours, theirs = (
        costs.estimated((1, 2, 4, 8), 1, costs.dtype_of(model), "v5e", costs.shares_of(model, "v5e"))
        for model in (target, tiny_mixture.untrained(0, experts=False))
    )
    assert np.all(np.diff(ours - theirs) > 0.05)
