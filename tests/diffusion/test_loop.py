"""The denoising loop: what it equals, by which noise it draws, when rows end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import toy_denoisers as toys
from tiers import exhaustive

import specjax
from specjax import UsageError
from specjax.diffusion import (
    Control,
    ControlAction,
    Denoiser,
    Procedure,
    autoregressive,
    forward,
    methods,
    rules,
    schedules,
)
from specjax.diffusion.caches import append
from specjax.diffusion.loop import get_canvas
from specjax.diffusion.prepare import prepare
from specjax.diffusion.procedures import procedure_of
from specjax.diffusion.types import Window
from specjax.engine.prepare import Settings
from specjax.engine.run import start, step
from specjax.engine.stream import steps

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 11, [3] * 8]
ONE_A_PASS = Procedure(schedules.blocks(1), rules.quota())


def texts(denoiser, method, prompts=PROMPTS, seed=3, count=18, **settings):
    return specjax.denoise(denoiser, method, prompts, key=seed, max_new_tokens=count, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_block_of_one_is_autoregression(temperature):
    target = toy.tiny_llama()
    settings = {"key": 3, "max_new_tokens": 18, "temperature": temperature, "eos": 38, "logprobs": True}
    plain = specjax.decode(target, "autoregressive", PROMPTS, **settings)
    ours = specjax.denoise(autoregressive(target), ONE_A_PASS, PROMPTS, **settings)
    assert ours.to_lists() == plain.to_lists() and ours.finish_reasons == plain.finish_reasons
    assert ours.stats.target_passes.tolist() == plain.stats.target_passes.tolist() == ours.columns.tolist()
    np.testing.assert_array_equal(ours.logprobs, plain.logprobs)


@pytest.mark.parametrize("denoiser", [toys.full("shifted"), toys.causal(), toys.causal(4, "seed_and_mask")])
def test_a_row_alone_is_the_row_in_a_batch(denoiser):
    method = methods.llada(denoiser, steps=3, **({} if denoiser.is_causal else {"block": 8}))
    batch = texts(denoiser, method, temperature=0.8)
    for row, key in enumerate(toys.keys_of(3, len(PROMPTS))):
        alone = texts(denoiser, method, [PROMPTS[row]], key[None], temperature=0.8)
        assert alone.to_lists()[0] == batch.to_lists()[row]
        assert alone.decided_at[0].tolist() == batch.decided_at[row].tolist()


def test_one_pass_over_everything_is_what_the_cache_of_blocks_says():
    """The window's rows of every pass equal one block-causal pass over the text so far, without any cache."""
    denoiser = toys.causal()
    job = prepare(denoiser, methods.sdar(denoiser, tau=2, steps=2), PROMPTS, Settings(), key=0, max_new_tokens=14)
    state = start(job)
    for _ in range(5):
        np.testing.assert_allclose(differences(job.parts, state)[..., : toys.MASK], 0, atol=3e-5)
        state, _, _ = step(job.parts, state)


@jax.jit
def differences(parts, state):
    """Return the differences of the logits of the window, in rows that have not ended."""
    denoiser, canvas = parts.denoiser, get_canvas(state)
    place, _ = parts.procedure.schedule.place(state.draft.slots.schedule, canvas)
    window = Window(place, place != state.draft.window, ~state.done, parts.width)
    output, _ = parts.memory.look(denoiser, state.cache, canvas, window)
    plain = uncached(denoiser, canvas)[jnp.arange(len(place))[:, None], place[:, None] + jnp.arange(4)]
    counts = output.predicted & window.active[:, None]
    return jnp.where(counts[..., None], forward.compute_logits(denoiser, output.hidden) - plain, 0)


def uncached(denoiser, canvas):
    batch, size = canvas.tokens.shape
    columns = jnp.broadcast_to(jnp.arange(size), (batch, size))
    mask = columns[:, None, :] // denoiser.block <= columns[:, :, None] // denoiser.block
    cache = denoiser.model.init_cache(denoiser.params, None, batch, 1)
    hidden, _ = forward.forward(denoiser, cache, forward.input_tokens(denoiser, canvas, columns), columns, mask)
    return forward.compute_logits(denoiser, hidden)


def test_fused_clean_passes_change_no_text_and_spare_one_pass_a_block():
    denoiser = toys.causal()
    fused, apart = (
        texts(denoiser, methods.sdar(denoiser, tau=2, steps=2, fuse=fuse), temperature=0.8) for fuse in (True, False)
    )
    assert fused.to_lists() == apart.to_lists()
    starts = [len(prompt) for prompt in PROMPTS]
    blocks = [(n + 17) // 4 - (n - 1) // 4 for n in starts]  # whose clean pass is followed by another
    spared = (apart.stats.target_passes - fused.stats.target_passes).tolist()
    assert spared == blocks


def test_columns_are_those_of_the_row_and_computed_ones_those_of_the_program():
    denoiser, settings = toys.frozen([0.5] * 200), {"count": 12}
    alone = texts(denoiser, "llada", [[1]], **settings)
    both = texts(denoiser, "llada", [[1], [2] * 150], **settings)
    assert alone.columns.tolist() == [12 * 13] and both.columns.tolist() == [12 * 13, 12 * 162]
    assert alone.computed.tolist() == [12 * 32] and both.computed.tolist() == [12 * 192] * 2
    assert both.computed_per_token.tolist() == [192, 192]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dimple", {}),
        exhaustive("fast_dllm", {"memory": "dual"}),
        exhaustive("fast_dllm", {"memory": "prefix"}),
        exhaustive("dkv_cache", {"block": 8}),
        exhaustive("window_diffusion", {"refresh": 4}),
        exhaustive("ete", {"block": 8}),
        exhaustive("freedave", {"block": 8}),
    ],
)
def test_columns_do_not_depend_on_the_batch_and_are_never_more_than_the_program_computes(name, options):
    denoiser = toys.full("shifted")
    make = lambda: procedure_of(name, denoiser, **options)
    both = texts(denoiser, make(), PROMPTS[:2])
    for row in range(2):
        alone = texts(denoiser, make(), [PROMPTS[row]], toys.keys_of(3, 2)[row][None])
        assert alone.columns[0] == both.columns[row]
    assert np.all(both.columns <= both.computed)


def test_several_samples_of_a_prompt_are_rows_of_their_own():
    denoiser = toys.causal()
    both = texts(denoiser, "sdar", PROMPTS[:2], temperature=0.9, samples_per_prompt=2).to_lists()
    keys = toys.keys_of(3, 2)
    for row in range(4):
        key = jax.random.fold_in(keys[row // 2], row % 2)[None]
        assert texts(denoiser, "sdar", [PROMPTS[row // 2]], key, temperature=0.9).to_lists()[0] == both[row]


def test_a_longer_text_begins_with_the_shorter_one():
    denoiser = toys.causal()
    short, long = (texts(denoiser, "sdar", count=count).to_lists() for count in (7, 18))
    assert [row[:7] for row in long] == short


def test_a_row_ends_at_an_eos_once_all_before_it_is_decided():
    denoiser = toys.frozen([0.3, 0.3, 0.35, 0.4, 0.5, 0.45, *np.linspace(0.8, 0.6, 10)])
    full = texts(denoiser, methods.llada(denoiser, block=None), [[1, 2]], count=12, eos=5)
    assert full.to_lists() == [[2, 3, 4, 5]] and full.finish_reasons == ["eos"]
    assert full.decided_at[0, :4].tolist() == [11, 10, 8, 9] and full.stats.target_passes[0] == 12


def test_what_streams_is_final_and_in_order():
    denoiser = toys.full()
    job = prepare(denoiser, methods.llada(denoiser, block=8), PROMPTS, Settings(), key=3, max_new_tokens=18)
    streamed = [[] for _ in PROMPTS]
    for one in steps(job):
        for row, tokens in zip(streamed, one.tokens, strict=True):
            row += tokens
    assert streamed == texts(denoiser, methods.llada(denoiser, block=8)).to_lists()


def test_two_tokens_that_hang_together_are_right_one_at_a_time_and_wrong_half_the_time_at_once():
    denoiser, prompts = toys.coupled(), [[2]] * 2000
    for steps_, low, high in ((None, 1.0, 1.0), (1, 0.45, 0.55)):
        result = texts(denoiser, methods.llada(denoiser, block=2, steps=steps_), prompts, count=2, temperature=1.0)
        tokens = np.asarray(result.tokens[:, :2])
        assert low <= np.mean(tokens[:, 0] != tokens[:, 1]) <= high


def test_noise_is_that_of_plain_decoding_only_where_the_text_was_written_from_left_to_right():
    keys, columns = toys.keys_of(0, 1), jnp.arange(4)[None] + 5
    first, later = (
        jax.random.key_data(forward.column_keys(keys, columns, jnp.array([5]), jnp.array([n])))[0] for n in (0, 1)
    )
    plain = jax.random.key_data(jax.vmap(lambda c: jax.random.fold_in(jax.random.fold_in(keys[0], c), 1))(columns[0]))
    assert [bool(jnp.all(a == b)) for a, b in zip(first, plain, strict=True)] == [True, False, False, False]
    assert [bool(jnp.all(a == b)) for a, b in zip(later, plain, strict=True)] == [False, True, False, False]
    assert len({tuple(map(int, row)) for row in (*first, *later)}) == 8


def test_a_second_call_compiles_nothing_and_a_step_moves_nothing_to_the_host():
    denoiser = toys.causal()
    texts(denoiser, "sdar")
    with no_compiles():
        texts(denoiser, "sdar", [[5, 4], [3, 2, 1], [1] * 9, [2] * 12], seed=8)
    job = prepare(denoiser, methods.sdar(denoiser), PROMPTS, Settings(), key=3, max_new_tokens=18)
    state = start(job)
    with jax.transfer_guard("disallow"):
        step(job.parts, state)


def no_compiles():
    import contextlib

    from specjax.engine.run import run

    @contextlib.contextmanager
    def same():
        num_programs = run._cache_size()
        yield
        assert run._cache_size() == num_programs

    return same()


def test_a_control_can_fill_and_end():
    stop_at = Control(lambda params, state, canvas, proposal, view, wide: (ControlAction(end=canvas.start + 5), state))
    fill = Control(
        lambda params, state, canvas, proposal, view, wide: (ControlAction(fill=canvas.passes == 2), state), wide=True
    )
    denoiser = toys.frozen(np.linspace(0.8, 0.4, 30))
    base = methods.llada(denoiser, block=None)
    ended = texts(denoiser, base.replace(control=stop_at), [[1, 2]], count=12)
    assert ended.to_lists() == [[2, 3, 4, 5, 6]] and ended.stats.target_passes.tolist() == [5]
    filled = texts(denoiser, base.replace(control=fill), [[1, 2]], count=12)
    assert filled.stats.target_passes.tolist() == [3] and filled.decided_at[0].tolist() == [0, 1, *[2] * 10]
    assert filled.to_lists() == texts(denoiser, base, [[1, 2]], count=12).to_lists()


def test_a_fill_has_no_other_choice_at_any_temperature():
    """The column that the rule drew in the pass of the fill is filled, too."""
    fill = Control(
        lambda params, state, canvas, proposal, view, wide: (ControlAction(fill=canvas.passes == 1), state), wide=True
    )
    denoiser, method = toys.frozen(np.full(30, 0.5)), rules.quota("left_to_right")
    base = methods.llada(denoiser, block=None).replace(control=fill, rule=method)
    filled = texts(denoiser, base, [[1, 2]] * 8, count=12, temperature=1.0, logprobs=True)
    assert np.all(filled.logprobs[:, 1:] == 0) and np.all(filled.logprobs[:, 0] < 0)
    assert np.all(filled.tokens[:, 1] == 3)


def test_parts_that_do_not_fit_are_refused_in_a_sentence():
    causal, full = toys.causal(), toys.full()
    for method, denoiser, words in (
        ("sdar", full, "block-causal"),
        (Procedure(schedules.blocks(8), rules.quota()), causal, "the model one of 4"),
        (Procedure(schedules.blocks(8), rules.quota(), append()), full, "leave the cache out"),
        ("nonesuch", full, "unknown diffusion method"),
    ):
        with pytest.raises(UsageError, match=words):
            texts(denoiser, method)
    with pytest.raises(UsageError, match="does not divide"):
        schedules.blocks(8, sub_block=3)
    with pytest.raises(UsageError, match="does not support verifier"):
        texts(full, "llada", verifier="standard")
    for wrong in (
        {"attention": "block_causal"}, {"block": 4}, {"seeding": "seed_and_mask"}, {"mask_token": 64},
        {"attention": "block_causal", "block": 4, "alignment": "shifted"},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            dataclasses.replace(full, **wrong)
    assert isinstance(full, Denoiser)
