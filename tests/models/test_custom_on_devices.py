"""A user's own models: any cache, and several devices."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import exhaustive
from toy import tiny_llama, tiny_llama_alike
from toy_models import alike, recurrent

import specjax
from specjax import UsageError, decode, trees
from specjax.drafters import autoregressive, prompt_lookup, two_model
from specjax.models.cache import KVCache, Pending
from specjax.types import Target

PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [3], [7, 7, 7]]
OPTIONS = {"key": jax.random.key(1), "max_new_tokens": 10}


@functools.cache
def with_dicts(model):
    """Return the model with plain dicts as cache and pending tokens."""
    cache = lambda entries: KVCache(entries["keys"], entries["values"], entries["length"])
    pending = lambda new: None if new is None else Pending(**new)
    as_cache = lambda entries: {"keys": entries.k, "values": entries.v, "length": entries.length}

    def forward(params, tokens, entries, *, earlier=None, **options):
        output, new = model.forward(params, tokens, cache(entries), earlier=pending(earlier), **options)
        return output, new._asdict()

    def axes(entries):
        return as_cache(model.axes(cache(entries))) if "keys" in entries else model.axes(pending(entries))._asdict()

    return model._replace(
        init_cache=lambda *arguments: as_cache(model.init_cache(*arguments)),
        forward=forward,
        commit=lambda entries, new, *path: as_cache(model.commit(cache(entries), pending(new), *path)),
        rewind=lambda entries, length: as_cache(model.rewind(cache(entries), length)),
        widen=lambda new, slots: model.widen(pending(new), slots)._asdict(),
        insert=lambda wide, new, place: model.insert(pending(wide), pending(new), place)._asdict(),
        axes=axes,
        name="dicts",
        config=None,
    )


@pytest.mark.parametrize("tree", [None, exhaustive(trees.branching("2x2"), id="tree")])
def test_a_dict_may_be_the_cache(tree):
    target, draft = tiny_llama(), tiny_llama_alike()
    device_part = [Target(with_dicts(one.model), one.params) for one in (target, draft)]
    for more in ({}, {"temperature": 1.0}):
        expected = decode(target, two_model(draft, 3, tree), PROMPTS, **OPTIONS, **more)
        actual = decode(device_part[0], two_model(device_part[1], 3, tree), PROMPTS, **OPTIONS, **more)
        assert actual.to_lists() == expected.to_lists()
        assert actual.stats.accepted.tolist() == expected.stats.accepted.tolist()


@pytest.mark.parametrize("method", ["prompt_lookup", "two_model"])
def test_prompts_split_over_devices_that_have_the_whole_model(method):
    target = recurrent()
    drafter = prompt_lookup() if method == "prompt_lookup" else two_model(alike(target), 2)
    tokens, lengths = np.zeros((4, 5), np.int32), np.array([len(row) for row in PROMPTS], np.int32)
    for place, row in zip(tokens, PROMPTS, strict=True):
        place[: len(row)] = row
    mesh = specjax.mesh(data=4, model=1)
    full, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    for more in ({}, {"temperature": 1.0}):
        alone = decode(target, drafter, (tokens, lengths), **OPTIONS, **more)
        split = decode(
            *jax.device_put((target, drafter), full), tuple(jax.device_put((tokens, lengths), rows)), **OPTIONS, **more
        )
        assert split.to_lists() == alone.to_lists()
        assert not split.tokens.sharding.is_fully_replicated
    plain = decode(target, autoregressive(), (tokens, lengths), **OPTIONS).to_lists()
    assert decode(target, drafter, (tokens, lengths), **OPTIONS).to_lists() == plain


def test_shard_says_what_to_do_instead():
    with pytest.raises(UsageError, match=r"recurrent cannot be sharded.*replicate its parameters"):
        specjax.shard(recurrent(), specjax.mesh(data=2, model=1))
