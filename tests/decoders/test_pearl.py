"""The card's traces on scripted models, texts equal to plain decoding, and both sides in parallel."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import those
from toy import scripted, tiny_llama, tiny_llama_alike
from toy_models import alike, encoding, inputs_of, recurrent

import specjax
from specjax import UsageError
from specjax.decoders import pearl, pearl_in_one_program
from specjax.decoders.loop_setup import init_loop
from specjax.decoders.pearl import Role, Text, _draft, _place, _read, _verify, join, make_roles
from specjax.types import Sampling, Target

in_one = importlib.import_module("specjax.decoders.pearl_in_one_program")  # the function has its name

VOCAB = 16
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7], [3]]
OPTIONS = {"key": jax.random.key(3), "max_new_tokens": 20}
RIGHT = [i % 7 + 1 for i in range(40)]  # by position, the prompt of one token included


def on(model, device):
    return jax.device_put(model, jax.devices()[device])


def run_scripts(wrong, **options):
    """Return a target that writes RIGHT in every row, and a draft model that errs at the new tokens wrong[b]."""
    drafts = [[t + 1 if i - 1 in mistakes else t for i, t in enumerate(RIGHT)] for mistakes in wrong]
    target, draft = on(scripted([RIGHT] * len(wrong), VOCAB), 1), on(scripted(drafts, VOCAB), 2)
    settings = {"key": jax.random.key(0), "max_new_tokens": 13, "num_tokens": 3} | options
    return pearl(target, draft, [RIGHT[:1]] * len(wrong), **settings)


def test_hand_worked_rows_of_one_batch():
    """Check the card's rows: wrong at 5 only, always, never. Each row has its own mode."""
    result = run_scripts([{5}, range(40), ()])
    assert result.to_lists() == [RIGHT[1:14]] * 3
    some, always, never = np.moveaxis(result.trace.lengths, 1, 0)
    assert some[:5].tolist() == [3, 6, 6, 9, 12]
    assert result.trace.post[:5, 0].tolist() == [True, True, False, True, True]
    assert result.trace.verified[:5, 0].tolist() == [1, 4, 6, 7, 10]
    assert always.tolist() == list(range(1, 14))
    assert not result.trace.post[:, 1].any()
    assert never[:5].tolist() == [3, 6, 9, 12, 13]
    assert result.trace.verified[:5, 2].tolist() == [1, 4, 7, 10, 13]


def test_statistics_of_these_rows():
    stats = run_scripts([{5}, range(40), ()]).stats
    assert stats.target_passes.tolist() == [6, 13, 5]
    assert stats.drafted.tolist() == [18, 39, 15]
    assert stats.accepted.tolist() == [12, 0, 13]
    # Places of 0, 1 2 3, 4 (5 fails), 6, 7 8 9, 10 11 12 in the drafts 0-2, 3-5, 6-8, 9-11, 12-14.
    assert stats.accepted_by_depth.tolist() == [[5, 4, 3], [0, 0, 0], [5, 4, 4]]
    assert stats.drafted_by_depth.tolist() == [[6] * 3, [13] * 3, [5] * 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=3), st.integers(1, 24), st.data())
def test_steps_are_those_of_the_card(gamma, wrong, limit, data):
    """Compare `join` with the card's rule row by row, for random mistakes, ends and eos."""
    eos_at = data.draw(st.integers(0, 40))
    right = np.where(np.arange(80) == eos_at, 1, 2)
    rows = len(wrong)
    drafts = np.array([[3 if i in mistakes else right[i] for i in range(80)] for mistakes in wrong])
    text = Text.of(np.zeros((rows, 40), np.int32), np.full((rows,), 5, np.int32), limit, gamma)
    expected = [[0, False] for _ in wrong]  # length without the prompt, POST
    end = min(limit, eos_at + 1)
    while not text.done.all():
        previous = text
        behind = lambda table, start: np.stack([row[n : n + gamma] for row, n in zip(table, start - 5, strict=True)])
        text, _ = join(text, behind(drafts, text.length), behind([right] * rows, text.verified), np.array([1]))
        for b, mistakes in enumerate(wrong):
            if previous.done[b]:
                continue
            n, post = expected[b]
            tested = [*range(n - gamma + 1, n), n] if post else [n]
            failed = [i for i, position in enumerate(tested) if position in mistakes]
            if not failed:
                final, expected[b] = tested[-1] + 1, [n + gamma, True]
            else:
                final = n - gamma + failed[0] + 2 if post else n + 1
                expected[b] = [final, False]
            assert text.verified[b] - 5 == min(final, end)
            assert text.done[b] == (final >= end)
            if final < end:
                assert [text.length[b] - 5, text.post[b]] == expected[b]
    for b in range(rows):
        assert text.tokens[b, 5 : text.verified[b]].tolist() == right[:end].tolist()
    assert text.hit_eos.tolist() == [eos_at < limit] * rows


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["alike", "itself"])
def test_text_of_plain_decoding_on_ragged_rows_with_eos(draft, temperature):
    target = tiny_llama()
    other = tiny_llama() if draft == "itself" else tiny_llama_alike()
    plain = specjax.decode(target, "autoregressive", PROMPTS, temperature=temperature, **OPTIONS)
    eos = plain.to_lists()[1][7]
    plain = specjax.decode(target, "autoregressive", PROMPTS, temperature=temperature, eos=eos, **OPTIONS)
    result = pearl(on(target, 1), on(other, 2), PROMPTS, temperature=temperature, eos=eos, num_tokens=3, **OPTIONS)
    assert result.to_lists() == plain.to_lists()
    assert result.tokens.tolist() == plain.tokens.tolist()
    assert result.finish_reasons == plain.finish_reasons
    assert "eos" in plain.finish_reasons
    stats = result.stats
    if draft == "itself":  # the noise is the target's, so it never errs: 1 token, then 3 per step
        assert stats.target_passes.tolist() == [1 + -(-(n - 1) // 3) for n in plain.lengths.tolist()]
    else:
        assert (stats.accepted.sum() > 0) and (result.trace.post.any(0) & ~result.trace.post[:-1].all(0)).any()


def test_the_draft_model_forgets_what_failed():
    """Check PRE, in which the text is final: the first draft depends on that text alone."""
    result = pearl(on(tiny_llama(), 1), on(tiny_llama_alike(), 2), PROMPTS, num_tokens=3, **OPTIONS)
    post, verified = result.trace.post, result.trace.verified
    texts = [prompt + new for prompt, new in zip(PROMPTS, result.to_lists(), strict=True)]
    steps = [(s, b) for s in range(1, len(post)) for b in range(4) if not post[s - 1, b] and verified[s - 1, b] < 19]
    prefixes = [texts[b][: len(PROMPTS[b]) + verified[s - 1, b]] for s, b in steps]
    says = specjax.decode(
        tiny_llama_alike(), "autoregressive", prefixes, key=OPTIONS["key"], max_new_tokens=1
    ).to_lists()
    right = [texts[b][len(old)] == token for (s, b), old, (token,) in zip(steps, prefixes, says, strict=True)]
    assert right == [bool(post[s, b]) for s, b in steps]
    assert len(set(right)) == 2


def test_a_row_decodes_as_when_alone():
    target, draft = on(tiny_llama(), 1), on(tiny_llama(seed=1, layers=1), 2)
    keys = jax.random.split(jax.random.key(0), 4)
    settings = {"temperature": np.array([0.0, 0.7, 1.0, 1.3]), "num_tokens": 3, "max_new_tokens": 20}
    together = pearl(target, draft, PROMPTS, key=keys, **settings)
    alone = pearl(target, draft, PROMPTS[2:3], key=keys[2:3], **settings | {"temperature": np.array([1.0])})
    assert alone.to_lists()[0] == together.to_lists()[2]
    assert alone.trace.lengths[:, 0].tolist() == together.trace.lengths[: len(alone.trace.lengths), 2].tolist()


def test_meshes_of_their_own():
    target, draft = (tiny_llama(num_heads=8, num_kv_heads=4, seed=seed) for seed in (0, 1))
    devices = jax.devices()
    wide = specjax.shard(target, specjax.mesh(2, 2, devices=devices[:4]))
    small = specjax.shard(draft, specjax.mesh(1, 2, devices=devices[4:6]))
    plain = specjax.decode(target, "autoregressive", PROMPTS, temperature=0.8, **OPTIONS)
    assert pearl(wide, small, PROMPTS, temperature=0.8, num_tokens=3, **OPTIONS).to_lists() == plain.to_lists()


def test_second_call_compiles_nothing():
    target, draft = on(tiny_llama(), 1), on(tiny_llama(seed=1, layers=1), 2)
    first = pearl(target, draft, PROMPTS, temperature=0.8, num_tokens=3, **OPTIONS)
    with compiled_programs() as compiled:
        again = pearl(target, draft, PROMPTS, temperature=0.8, num_tokens=3, **OPTIONS)
    assert compiled == []
    assert again.to_lists() == first.to_lists()


def test_gamma_is_measured():
    target, draft = on(tiny_llama(), 1), on(tiny_llama(seed=1, layers=1), 2)
    plain = specjax.decode(tiny_llama(), "autoregressive", PROMPTS, **OPTIONS)
    result = pearl(target, draft, PROMPTS, **OPTIONS)
    assert 1 <= result.num_tokens <= 32
    assert result.to_lists() == plain.to_lists()


def test_a_step_copies_no_cache():
    role = _place(Role(on(tiny_llama(), 1), Sampling(), jax.random.split(jax.random.key(0), 4)))
    tokens, length = np.ones((4, 2000), np.int32), np.array([5, 9, 7, 1], np.int32)
    cache = _read(role, tokens, length)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((cache.k, cache.v)))
    for lowered in (
        _draft.lower(role, cache, tokens[:, :1], length, gamma=3),
        _verify.lower(role, cache, tokens[:, :3], length),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size  # updated in place
        assert memory.temp_size_in_bytes < size / 2


def test_both_are_dispatched_before_either_is_read(monkeypatch):
    order = []
    module = pearl.__globals__
    for name in ("_verify", "_draft"):
        step = module[name]
        monkeypatch.setitem(module, name, lambda *a, name=name, step=step, **k: order.append(name) or step(*a, **k))
    read = jax.device_get

    def both(arrays):
        if isinstance(arrays, tuple):  # not what is read before the first step
            order.append([leaf.dtype.name for leaf in arrays])
        return read(arrays)

    monkeypatch.setattr(jax, "device_get", both)
    run_scripts([()])
    assert order == ["_verify", "_draft", ["int32", "int32"]] * 5  # token ids, nothing else


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be a whole number of at least 1, not 0"),
        ({"draft": on(tiny_llama(seed=1), 1)}, "target and draft share .*:1 .*different devices"),
        ({"draft": jax.device_get(tiny_llama(seed=1))}, "the draft is on no device; place its parameters"),
        ({"draft": on(recurrent(64), 2)}, "recurrent cannot rewind its cache, which PEARL needs; use two_model"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
    ],
)
def test_bad_settings_are_named(change, message):
    arguments = {"draft": on(tiny_llama(seed=1), 2), "num_tokens": 2, **OPTIONS, **change}
    with pytest.raises(UsageError, match=message):
        pearl(on(tiny_llama(), 1), arguments.pop("draft"), PROMPTS, **arguments)


@pytest.mark.parametrize("temperature", those([0.8], [0.0, 0.8]))
def test_one_program_gives_the_same_steps(temperature):
    """Compare text and statistics of both programs, on ragged rows with eos, also within the caller's `jit`."""
    target, draft = tiny_llama(), tiny_llama_alike()
    options = {"temperature": temperature, "num_tokens": 3, **OPTIONS}
    plain = specjax.decode(target, "autoregressive", PROMPTS, temperature=temperature, **OPTIONS)
    options["eos"] = plain.to_lists()[1][7]
    two = pearl(on(target, 1), on(draft, 2), PROMPTS, **options)
    one = pearl_in_one_program(target, draft, PROMPTS, devices=jax.devices()[3:5], **options)
    assert one.to_lists() == two.to_lists() and 0 < int(one.hit_eos.sum()) < len(PROMPTS)
    for ours, theirs in zip(*map(jax.tree.leaves, (one.stats, two.stats)), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    @jax.jit
    def program(target, draft):
        return pearl_in_one_program(target, draft, PROMPTS, **options).tokens

    np.testing.assert_array_equal(program(target, draft), one.tokens)


def test_one_program_has_no_collective_in_its_branches_and_copies_no_cache():
    target, draft = tiny_llama(), tiny_llama_alike()
    loop_inputs = init_loop(target, PROMPTS, specjax.Settings(), key=OPTIONS["key"], max_new_tokens=20, room=1)
    tokens, lengths = loop_inputs.tokens, loop_inputs.prompts
    roles = make_roles(target, draft, loop_inputs)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("role",))
    arguments = roles, tokens, lengths, loop_inputs.usable, loop_inputs.eos
    lowered = in_one._run.lower(*arguments, mesh=mesh, gamma=3, max_new_tokens=20)
    text = lowered.compile().as_text()
    assert "conditional(" in text
    slots = draft.model.init_cache(draft.params, None, 4, tokens.shape[1] + 128).k[0].shape
    cache = "f32[" + ",".join(map(str, slots)) + "]"
    # Copies of zeros are the empty caches.
    assert cache in text and not re.findall(rf"= {re.escape(cache)}\S* copy\(%(?!\w*broadcast)", text)
    exchanges = [part for part in text.split("\n\n") if re.search(r" all-(reduce|gather)(-start)?\(", part)]
    assert len(exchanges) == 1 and " conditional(" in exchanges[0]  # in the body of the loop, beside the branches


def test_models_with_an_encoder():
    """Pass inputs to both models; a draft model without inputs gets none."""
    inputs, prompts = inputs_of(3), [[1, 2], [3], [4, 5, 6]]
    options = {"key": jax.random.key(3), "max_new_tokens": 8, "inputs": inputs, "temperature": 0.8}
    plain = specjax.decode(encoding(), "autoregressive", prompts, **options).to_lists()
    result = pearl(on(encoding(), 1), on(alike(encoding()), 2), prompts, num_tokens=2, **options)
    assert result.to_lists() == plain and result.stats.accepted.sum() > 0
    assert pearl_in_one_program(encoding(), tiny_llama(vocab=12), prompts, num_tokens=2, **options).to_lists() == plain


def test_what_it_cannot_do_is_named():
    target = on(tiny_llama(), 1)
    with pytest.raises(UsageError, match="cannot be part of your own jit"):
        jax.jit(lambda draft: pearl(target, draft, PROMPTS, num_tokens=2, **OPTIONS))(tiny_llama(seed=1))
    with pytest.raises(UsageError, match="needs two devices, not 1"):
        pearl_in_one_program(tiny_llama(), tiny_llama(), PROMPTS, num_tokens=2, devices=jax.devices()[:1], **OPTIONS)
    with pytest.raises(UsageError, match="is sharded, but each role has one device"):
        sharded = specjax.shard(tiny_llama(), specjax.mesh(1, 2))
        pearl_in_one_program(sharded, tiny_llama(), PROMPTS, num_tokens=2, **OPTIONS)
    with pytest.raises(UsageError, match="more than the capacity of 8"):
        pearl(target, on(tiny_llama(seed=1, max_positions=8), 2), PROMPTS, num_tokens=2, **OPTIONS)


def slow(target, rounds):
    """Return the same model with useless work in every pass."""
    forward = target.model.forward

    def slowly(params, tokens, cache, **options):
        output, pending = forward(params, tokens, cache, **options)
        x = jnp.broadcast_to(options["positions"][0, 0].astype(jnp.float32), (200, 200))
        work = jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), x)
        return output._replace(logits=output.logits + 1e-9 * work[0, 0]), pending

    return Target(target.model._replace(forward=slowly), target.params)


def test_the_draft_runs_while_the_target_does(monkeypatch):
    """Use a target that is about 30 times slower and dispatched first: drafts must not wait for it."""
    read, target_running = jax.device_get, []

    def first_drafts(arrays):
        if not isinstance(arrays, tuple):  # before the first step
            return read(arrays)
        drafts, picks = arrays
        drafts.block_until_ready()
        target_running.append(not picks.is_ready())
        return read(arrays)

    monkeypatch.setattr(jax, "device_get", first_drafts)
    target, draft = slow(on(scripted([RIGHT], VOCAB), 1), 300), slow(on(scripted([RIGHT], VOCAB), 2), 3)
    pearl(target, draft, [RIGHT[:1]], key=jax.random.key(0), max_new_tokens=13, num_tokens=3)
    assert target_running[1:] == [True] * 4  # in the first step the draft's program is compiled meanwhile
