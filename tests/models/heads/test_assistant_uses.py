"""Assistants of Gemma 4 in all forms of decoding: the text is that of the target without drafts."""

import functools

import jax
import numpy as np
import pytest
import tokenizers
from gemma4_models import assistant, copying_pair, loaded, torch
from tiers import those

import specjax
from specjax import Request, drafters
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.errors import UsageError
from specjax.models.loading.heads import read_head
from specjax.persistence import Checkpoints

PROMPTS = [[1, 2, 3, 4, 5], [*range(7, 22)]]  # the second is longer than the window
COUNT = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a target, of an assistant whose drafts are accepted, and of one with clusters."""
    torch.manual_seed(3)
    target, copy = copying_pair(num_key_value_heads=2)
    torch.manual_seed(1)
    models = {"target": target, "copy": copy, "clusters": assistant(num_key_value_heads=2)}
    places = {name: tmp_path_factory.mktemp(name) for name in models}
    for name, model in models.items():
        model.save_pretrained(places[name])
    model = tokenizers.models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(places["target"] / "tokenizer.json"))
    return places


@pytest.fixture(scope="module")
def load(folders):
    """Return a function that loads the target and the drafter of an assistant, once for equal options."""

    @functools.cache
    def load_target(**options):
        return specjax.load(folders["target"], **{"dtype": "float32"} | options)[0]

    def load_pair(name="copy", tree=None, mesh=None, **options):
        target = load_target(**options)
        target = target if mesh is None else specjax.shard(target, mesh_of(*mesh))
        return target, head_drafter(read_head(folders[name], target).head, 3, tree=tree and specjax.trees.parse(tree))

    return load_pair


def mesh_of(data, model):
    return specjax.mesh(data, model, devices=jax.devices()[: data * model])


def decode(target, drafter, **options):
    return specjax.decode(target, drafter, PROMPTS, **{"key": 0, "max_new_tokens": COUNT} | options)


OPTIONS = {
    "int8 cache": {"cache_dtype": "int8"},
    "int8": {"quantize": "int8"},
    "int8 weights": {"quantize": "int8-weights"},
    "int4 weights": {"quantize": "int4-weights"},
    "bfloat16": {"dtype": "bfloat16"},
    "stacked": {"stacked": True},
    "tree": {"tree": "top:3x2x1"},
    "tree of clusters": {"name": "clusters", "tree": "top:3x2x1"},
    "rows over data": {"mesh": (2, 1)},
    "heads over model": {"mesh": (1, 2)},
    "both": {"mesh": (2, 2)},
}


@pytest.mark.parametrize("case", those({"int8 cache", "both"}, OPTIONS))
def test_the_greedy_text_is_that_of_the_target(case, load):
    target, drafter = load(**OPTIONS[case])
    result = decode(target, drafter)
    assert result.to_lists() == decode(target, drafters.autoregressive()).to_lists()
    assert int(np.sum(result.stats.accepted)) > (0 if OPTIONS[case].get("name") else 3)


def test_the_key_value_heads_must_fit_the_mesh(tmp_path):
    with pytest.raises(UsageError, match="does not divide the 4 query and 1 key/value heads"):
        specjax.shard(loaded(copying_pair()[0], tmp_path), mesh_of(1, 2))


def test_same_bits_is_refused(folders):
    with pytest.raises(UsageError, match="layers have several kinds"):
        specjax.load(folders["target"], dtype="bfloat16", same_bits=True)


@pytest.mark.exhaustive
def test_samples_are_those_of_rows(load):
    target, drafter = load()
    sampled = {"temperature": 0.8, "samples_per_prompt": 2}
    result = decode(target, drafter, **sampled)
    assert result.to_lists() == decode(target, drafter, **sampled).to_lists() and len(result.to_lists()) == 4
    greedy = decode(target, drafter, samples_per_prompt=2).to_lists()
    assert greedy[0] == greedy[1] == decode(target, drafters.autoregressive()).to_lists()[0]


@pytest.mark.exhaustive
def test_streams_resume(load, tmp_path):
    target, drafter = load()
    expected = decode(target, drafter).to_lists()
    run = lambda: specjax.stream(
        target, drafter, PROMPTS, key=0, max_new_tokens=COUNT, checkpoint=Checkpoints(tmp_path, every=1)
    )  # fmt: skip
    interrupted = run()
    for _ in range(2):
        next(interrupted)
    interrupted.close()
    assert texts_of(run()) == expected
    assert texts_of(specjax.stream(target, drafter, PROMPTS, key=0, max_new_tokens=COUNT)) == expected


def texts_of(steps):
    texts = [[], []]
    for step in steps:
        for text, tokens in zip(texts, step.tokens, strict=True):
            text += tokens
    return texts


def test_served_texts_are_those_of_single_prompts(load):
    """Prompts are read in chunks, and the second and the third begin with chunks of the first."""
    target, drafter = load()
    words = np.random.default_rng(0).integers(1, 60, 110).tolist()
    prompts = [words[:80], [*words[:66], 3, 4], words[:50], [5]]
    texts, cached = {i: [] for i in range(len(prompts))}, {}
    requests = [Request(prompt, 0) for prompt in prompts]
    for news in specjax.serve(target, drafter, requests, slots=1, longest_prompt=100, max_new_tokens=COUNT):
        texts[news.request] += news.tokens
        cached[news.request] = max(cached.get(news.request, 0), news.cached)
    expected = specjax.decode(target, drafters.autoregressive(), prompts, key=0, max_new_tokens=COUNT).to_lists()
    assert list(texts.values()) == expected and cached[1] == 64
