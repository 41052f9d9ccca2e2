"""The engine with hybrid targets: drafters, servers, streams, checkpoints, samples and meshes."""

import functools

import jax
import numpy as np
import pytest
from heads import OF_OTHER_TARGETS, tiny_head
from hybrids import commits_rejected, tiny_hybrid
from tiers import those
from toy import chi_square, tiny_datastore, tiny_llama
from toy_models import alike, law_of_triples

import specjax
from specjax import UsageError, adaptive, decoders, drafters, parallel, persistence, trees
from specjax.catalog import of_kind
from specjax.diffusion import Denoiser
from specjax.models.hybrid.config import LayerKind
from specjax.parallel.layer_parallel import check_layer_parallel
from specjax.types import Target

PROMPTS = ((1, 2, 3, 1, 2, 3, 1), (5,), tuple(range(30)))
NEW, SHORT = 110, 40
NEED_LAYERS = {"dynamic_exit", "early_exit", "superposed", "swift", "thinned", "kangaroo", "hidden_transfer", "m2r2"}
OPTIONS = {
    "auto": {"widths": (1, 3, 6), "costs": (1.0, 1.1, 1.2), "num_recycled": 7},
    "token_recycling": {"num_nodes": 7},
}
DRAFTERS = {
    name: row
    for name, row in of_kind("drafter").items()
    if not row.needs & {"denoiser", "fill"} and name not in OF_OTHER_TARGETS
}


def make(name: str, target: Target):
    """Return a drafter of the catalogue for the target; a draft model has attention only."""
    needs, options = DRAFTERS[name].needs, dict(OPTIONS.get(name, {}))
    if "datastore" in needs:
        options["datastore"] = tiny_datastore(64)
    draft = tiny_head(name, target) if "head" in needs else tiny_llama(seed=1, layers=5 if name == "easyspec" else 1)
    return specjax.make_drafter(name, target, draft, **options)


def decoded(drafter, target: Target | None = None, prompts=PROMPTS):
    target = tiny_hybrid() if target is None else target
    return specjax.decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=NEW)


@functools.cache
def plain() -> list[list[int]]:
    return decoded("autoregressive").to_lists()


@functools.cache
def tree_drafter():
    """Return a hybrid draft model that grows a tree, and errs now and then."""
    return drafters.two_model(alike(tiny_hybrid(), 0.03), tree=trees.parse("2x2x1"))


def test_plain_text_depends_on_the_whole_prompt():
    other = decoded("autoregressive", prompts=(*PROMPTS[:2], (9, *PROMPTS[2][1:]))).to_lists()
    assert other[:2] == plain()[:2] and other[2] != plain()[2] and len(set(plain()[0])) > 4


@pytest.mark.parametrize("name", those({"token_recycling"}, sorted(DRAFTERS.keys() - NEED_LAYERS - {"autoregressive"})))
def test_greedy_text_is_that_of_plain_decoding(name):
    assert decoded(make(name, tiny_hybrid())).to_lists() == plain()


def test_a_hybrid_draft_model_grows_trees_for_a_hybrid_target():
    result = decoded(tree_drafter())
    assert result.to_lists() == plain()
    accepted = int(result.stats.accepted.sum())
    assert 10 < accepted < int(result.stats.drafted.sum())
    target = commits_rejected(tiny_hybrid(), tree_drafter().num_nodes)
    assert decoded(tree_drafter(), target).to_lists() != plain()


@pytest.mark.exhaustive
def test_a_hybrid_draft_model_drafts_for_a_transformer():
    target, options = tiny_llama(), {"key": jax.random.key(0), "max_new_tokens": 24}
    chain = drafters.two_model(tiny_hybrid(), 3)
    expected = specjax.decode(target, "autoregressive", PROMPTS, **options).to_lists()
    assert specjax.decode(target, chain, PROMPTS, **options).to_lists() == expected


def counted_triples(target: Target, drafter, samples: int = 2000) -> np.ndarray:
    """Count int[3, 3, 3] three sampled tokens of a vocabulary of 3."""
    options = {"key": jax.random.key(7), "max_new_tokens": 3, "temperature": 3.0, "samples_per_prompt": samples}
    result = specjax.decode(target, drafter, [[1, 0, 2, 1]], **options)
    index = np.asarray(result.tokens) @ np.array([9, 3, 1])
    return np.bincount(index, minlength=27).reshape(3, 3, 3)


def test_a_sampled_tree_has_the_law_of_the_target():
    target = tiny_hybrid(3, width=16, head_dim=8)
    drafter = drafters.two_model(alike(target, 0.5), tree=trees.parse("2x1"))
    law = law_of_triples(target, [1, 0, 2, 1], temperature=3.0)
    assert chi_square(counted_triples(target, drafter), law) > 1e-3
    wrong = commits_rejected(target, drafter.num_nodes)
    assert chi_square(counted_triples(wrong, drafter), law) < 1e-6


REQUESTS = ([1, 2, 3, 1, 2, 3, 4], [5], [7, 8], [3, 3, 3], [9, 1])
COUNTS = (9, 14, 30, 7, 5)


def test_served_texts_are_those_of_requests_alone():
    """Rows are replaced while others go on, so a state that a finished row leaves behind would be seen."""
    keys = jax.random.split(jax.random.key(5), len(REQUESTS))
    requests = [specjax.Request(*request) for request in zip(REQUESTS, keys, COUNTS, strict=True)]
    texts: list[list[int]] = [[] for _ in REQUESTS]
    options = {"slots": 2, "longest_prompt": 8, "max_new_tokens": 30, "temperature": 0.9, "sampling": "coupled"}
    for piece in specjax.serve(tiny_hybrid(), tree_drafter(), requests, **options):
        texts[piece.request] += piece.tokens
    alone = specjax.decode(
        tiny_hybrid(), "autoregressive", REQUESTS, key=keys, max_new_tokens=30, temperature=0.9, sampling="coupled"
    ).to_lists()
    assert texts == [row[:count] for row, count in zip(alone, COUNTS, strict=True)]


def streamed(folder=None, stop=None, programs=None) -> list[list[int]]:
    checkpoint = folder and persistence.Checkpoints(folder, 3)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    steps = specjax.stream(
        tiny_hybrid(), tree_drafter(), PROMPTS, key=jax.random.key(0), max_new_tokens=SHORT, checkpoint=checkpoint,
        programs=programs,
    )  # fmt: skip
    for number, step in enumerate(steps, 1):
        for text, new in zip(texts, step.tokens, strict=True):
            text += new
        if number == stop:
            break
    return texts


@pytest.mark.exhaustive
def test_a_resumed_stream_has_the_states_of_both_models(tmp_path):
    expected = [row[:SHORT] for row in plain()]
    assert streamed() == expected
    streamed(tmp_path / "run", stop=7)
    assert streamed(tmp_path / "run") == expected


@pytest.mark.exhaustive
def test_stored_programs_give_the_same_text(tmp_path):
    expected = [row[:SHORT] for row in plain()]
    assert streamed(programs=specjax.ProgramCache(tmp_path)) == expected
    again = specjax.ProgramCache(tmp_path)
    assert streamed(programs=again) == expected


@pytest.mark.exhaustive
def test_samples_of_a_prompt_have_states_of_their_own():
    drafter = drafters.token_recycling(64, num_nodes=7)
    options = {"key": jax.random.key(2), "max_new_tokens": 24, "temperature": 0.9, "sampling": "coupled"}
    ours, expected = (
        specjax.decode(tiny_hybrid(), one, PROMPTS[:2], samples_per_prompt=3, **options).to_lists()
        for one in (drafter, "autoregressive")
    )
    assert ours == expected and len(set(map(tuple, ours))) == 6


@pytest.mark.parametrize(
    ("data", "model", "value_heads"),
    [
        (2, 2, 4),
        pytest.param(1, 2, 3, marks=pytest.mark.exhaustive),
        pytest.param(4, 1, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_mesh_equals_one_device(data, model, value_heads):
    """Heads are split over "model"; three value heads are replicated."""
    target = tiny_hybrid(value_heads=value_heads)
    prompts, options = PROMPTS[:2] * 2, {"key": jax.random.key(0), "max_new_tokens": 40}
    expected = specjax.decode(target, "autoregressive", prompts, **options).to_lists()
    sharded = parallel.shard(target, parallel.mesh(data, model))
    drafter = drafters.token_recycling(64, num_nodes=7)
    assert specjax.decode(sharded, drafter, prompts, **options).to_lists() == expected
    cache = sharded.model.init_cache(sharded.params, None, 4, 64)
    state = cache.recurrent[0].state.sharding
    heads = value_heads // model if value_heads % model == 0 else value_heads
    assert state.shard_shape(cache.recurrent[0].state.shape)[:2] == (4 // data, heads)


@pytest.mark.exhaustive
def test_a_model_without_attention_has_no_heads_or_slots_to_split():
    target = tiny_hybrid(kinds=(LayerKind("mamba2"),), num_layers=1, num_heads=1)
    prompts, options = PROMPTS[:2], {"key": jax.random.key(0), "max_new_tokens": 24}
    expected = specjax.decode(target, "autoregressive", prompts, **options).to_lists()
    sharded = parallel.shard(target, parallel.mesh(1, 2, sequence=2))
    drafter = drafters.token_recycling(64, num_nodes=7)
    assert specjax.decode(sharded, drafter, prompts, **options).to_lists() == expected


@pytest.mark.exhaustive
def test_the_model_is_checked_like_any_other():
    report = specjax.check_model(tiny_hybrid().model, tiny_hybrid().params)
    assert report.passed, report


@pytest.mark.parametrize("name", sorted(NEED_LAYERS))
def test_drafters_that_skip_layers_are_refused(name):
    with pytest.raises(UsageError, match=r"cannot run a part of its layers|has no layers that can be skipped") as error:
        specjax.decode(tiny_hybrid(), make(name, tiny_hybrid()), [[1, 2]], key=0, max_new_tokens=2)
    assert "hybrid" in str(error.value)
    assert name in str(error.value) or (name == "thinned" and "calm" in str(error.value))


def test_adaptive_methods_are_refused():
    with pytest.raises(UsageError, match="hybrid has no layers that can be skipped, which calm needs"):
        adaptive.skip_layers(tiny_hybrid(), adaptive.calm(0.5))
    with pytest.raises(UsageError, match="has no layers that can be skipped"):
        drafters.two_model(tiny_hybrid(), depth="calm:0.5")


def test_draft_models_that_must_rewind_or_group_layers_are_refused():
    with pytest.raises(UsageError, match="hybrid cannot run its layers in groups, which easyspec needs; use two_model"):
        drafters.easyspec(tiny_hybrid())
    with pytest.raises(
        UsageError, match="hybrid cannot rewind its cache, which the middle model of hierarchical needs"
    ):
        drafters.hierarchical(tiny_hybrid(), drafters.prompt_lookup(2))
    with pytest.raises(UsageError, match="layers of several kinds, which a layer-parallel model cannot run in groups"):
        check_layer_parallel(tiny_hybrid().model.config, parallel.mesh(1, 2, layer=2))


@pytest.mark.parametrize("pair", [(tiny_hybrid, tiny_llama), (tiny_llama, tiny_hybrid)])
@pytest.mark.parametrize("loop", ["pearl", "pearl_in_one_program"])
def test_pearl_is_refused(loop, pair):
    target, draft = (make() for make in pair)
    with pytest.raises(UsageError, match="hybrid cannot rewind its cache, which PEARL needs; use two_model"):
        getattr(decoders, loop)(target, draft, PROMPTS, key=0, max_new_tokens=4, num_tokens=2)


def test_denoisers_are_refused():
    target = tiny_hybrid()
    with pytest.raises(
        UsageError, match="hybrid reads tokens in order, and a denoiser needs tokens that see later ones"
    ):
        Denoiser(target.model, target.params, 63)
