"""Guided targets: pairs of rows are two forward passes combined, and every method keeps the law of plain decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compiled_programs
from heads import tiny_head
from image_heads import vision_target
from tiers import those
from toy import chi_square, tiny_llama, tiny_llama_alike

import specjax
from specjax import UsageError, decode, trees
from specjax.drafters import auto, autoregressive, jacobi, prompt_lookup, token_recycling, two_model
from specjax.engine.prepare import Settings, prepare
from specjax.engine.run import start, step
from specjax.models import LlamaConfig, guided, images, make_model, unconditional
from specjax.models.decoder import DecoderConfig
from specjax.models.variants import guidance
from specjax.models.variants.guidance import _model
from specjax.models.vision.config import values_of

PROMPTS = [[5, 9, 2, 7], [3], list(range(20, 43))]
EMPTY = [[1], [8, 6, 1], list(range(40, 2, -1))]
"""Unconditional prompts are shorter and longer than the prompts."""
SCALES = np.array([3.0, 1.5, 2.0], np.float32)


@functools.cache
def target(scale=None):
    return guided(tiny_llama(), SCALES if scale is None else scale)


@jax.jit
def read(target, text):
    path = jnp.arange(len(text))
    return target.model.forward(
        target.params, text[None], target.model.init_cache(target.params, None, 1, 256), positions=path[None],
        mask=jnp.tril(jnp.ones((1, len(text), len(text)), bool)),
    )[0].logits[0]  # fmt: skip


def logits_of(text):
    """Return the logits float32[T, V] of one text that the plain target reads alone."""
    return read(tiny_llama(), jnp.asarray(np.pad(text, (0, 72 - len(text)))))[: len(text)]


@functools.cache
def guided_logits(row, answer):
    """Return the logits of the tokens after each token of an answer, by two passes over complete texts."""
    logits_after = lambda prompt: logits_of([*prompt, *answer])[len(prompt) - 1 :]
    c, u = logits_after(PROMPTS[row]), logits_after(EMPTY[row])
    return np.asarray(u + SCALES[row] * (c - u))


@functools.cache
def plain(count=12):
    """Return guided greedy texts by two passes over the complete texts for every token."""
    texts = []
    for row in range(len(PROMPTS)):
        answer = []
        for _ in range(count):
            answer.append(int(guided_logits(row, tuple(answer))[-1].argmax()))
        texts.append(answer)
    return texts


def test_logits_of_a_tree_are_two_passes_combined():
    """Read prompts in one pass, commit them, and score a tree with two branches in rows of different lengths."""
    model, params = target().model, target().params
    width = max(map(len, PROMPTS))
    tokens = jnp.asarray([[*prompt, *[0] * (width - len(prompt))] for prompt in PROMPTS])
    length = jnp.asarray([len(prompt) for prompt in PROMPTS])
    cache = model.start_cache(params, unconditional(EMPTY), length, 64)
    path = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (3, width, width))
    forward, commit = jax.jit(model.forward), jax.jit(model.commit)
    output, pending = forward(params, tokens, cache, positions=path, mask=mask)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(output.logits[row, len(prompt) - 1], guided_logits(row, ())[0], atol=2e-4)
    cache = commit(cache, pending, path, length)
    branches = [(5, 6), (8, 9)]
    nodes = jnp.broadcast_to(jnp.array([5, 6, 8, 9]), (3, 4))
    positions = length[:, None] + jnp.array([0, 1, 0, 1])
    mask = jnp.broadcast_to(np.kron(np.eye(2), np.tril(np.ones((2, 2)))).astype(bool), (3, 4, 4))
    output, pending = forward(params, nodes, cache, positions=positions, mask=mask)
    for row in range(3):
        for i, branch in enumerate(branches):
            expected = guided_logits(row, branch)[1:]
            np.testing.assert_allclose(output.logits[row, 2 * i : 2 * i + 2], expected, atol=2e-4)
    # The second branch is committed, and then forgotten in a part of the rows.
    second_branch = jnp.broadcast_to(jnp.array([2, 3, -1, -1]), (3, 4))
    longer = commit(cache, pending, second_branch, jnp.array([2, 2, 1]))
    shorter = model.rewind(longer, length + jnp.array([2, 0, 1]))
    for row, answer in enumerate([(8, 9), (), (8,)]):
        node, place = jnp.full((3, 1), 4), (length + len(answer))[:, None]
        alone = forward(params, node, shorter, positions=place, mask=jnp.ones((3, 1, 1), bool))[0].logits
        np.testing.assert_allclose(alone[row, 0], guided_logits(row, (*answer, 4))[-1], atol=2e-4)


METHODS = {
    "plain": autoregressive,
    "lookup": lambda: prompt_lookup(num_tokens=4),
    "Jacobi": lambda: jacobi(64, window=4),
    "tree": lambda: token_recycling(64),
    "draft model": lambda: two_model(tiny_llama_alike(), num_tokens=3),
    "guided draft model": lambda: two_model(guided(tiny_llama_alike(), SCALES), tree=trees.parse("top:3x2x1")),
    "by name": lambda: "auto",
}


METHODS["head"] = lambda: auto(64, head=tiny_head("eagle3", tiny_llama()), widths=(1, 4), costs=(1.0, 1.0))
"""A draft head reads the hidden states of the conditional rows."""


def greedy(drafter, of=None, **options):
    return decode(of or target(), drafter, PROMPTS, key=0, max_new_tokens=12, inputs=unconditional(EMPTY), **options)


@pytest.mark.parametrize("name", those({"Jacobi", "guided draft model", "head"}, list(METHODS)))
def test_greedy_texts_are_those_of_two_passes(name):
    assert greedy(METHODS[name]()).to_lists() == plain()


def with_positions_of_the_prompt():
    """Return a mutant: the unconditional rows have the positions of their conditional rows."""
    model = target().model
    pairs = guidance._pairs

    def forward(*arguments, **options):
        first = []

        def same(conditional, unconditional):
            first.append(conditional)
            return pairs(conditional, conditional if len(first) == 2 else unconditional)

        guidance._pairs = same
        try:
            return model.forward(*arguments, **options)
        finally:
            guidance._pairs = pairs

    return specjax.Target(model._replace(forward=forward), target().params)


def test_positions_of_the_conditional_row_fail():
    """The prompts of a pair have different lengths in all rows."""
    mutant = greedy(autoregressive(), with_positions_of_the_prompt()).to_lists()
    assert mutant != plain()


def test_another_scale_compiles_nothing():
    greedy(autoregressive())
    text = lambda scale: greedy(autoregressive(), guided(tiny_llama(), scale)).to_lists()
    scale = jax.block_until_ready(jnp.asarray([1.0, 1.0, 1.0]))
    with compiled_programs() as compiled:
        ours = text(scale)
    assert compiled == []
    assert ours == decode(tiny_llama(), autoregressive(), PROMPTS, key=0, max_new_tokens=12).to_lists()
    alone = decode(tiny_llama(), autoregressive(), [p[-1:] for p in EMPTY[:1]], key=0, max_new_tokens=12).to_lists()
    assert text(jnp.zeros(3))[:1] == alone


def test_guidance_of_a_part_of_the_text():
    """The first two tokens are those of the target, and the rest is guided up to the fifth."""
    part = greedy(autoregressive(), guided(tiny_llama(), SCALES, first=2, end=5)).to_lists()
    for row, text in enumerate(part):
        for place, token in enumerate(text[:7]):
            c = logits_of([*PROMPTS[row], *text[:place]])[-1]
            expected = guided_logits(row, tuple(text[:place]))[-1] if 2 <= place < 5 else c
            assert token == int(expected.argmax())


VOCAB = 4


@functools.cache
def small(seed):
    return tiny_llama(seed=seed, layers=1, width=16, vocab=VOCAB)


@functools.cache
def joint():
    """Return the law [V, V, V] of three guided tokens at temperature 2, by enumeration of all texts."""
    model, params = small(0).model, small(0).params
    answers = np.stack(np.meshgrid(*[range(VOCAB)] * 3, indexing="ij"), -1).reshape(-1, 3)

    def logits_after(prompt):
        texts = jnp.asarray([[*prompt, *answer] for answer in answers])
        size = texts.shape[1]
        path = jnp.broadcast_to(jnp.arange(size), texts.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(texts), size, size))
        cache = model.init_cache(params, None, len(texts), 128)
        return model.forward(params, texts, cache, positions=path, mask=mask)[0].logits[:, len(prompt) - 1 : -1]

    c, u = logits_after([2, 1]), logits_after([3])
    p = np.asarray(jax.nn.softmax((u + 2.5 * (c - u)) / 4.0, -1), np.float64)
    each = np.take_along_axis(p, answers[:, :, None], 2)[:, :, 0]
    return each.prod(1).reshape((VOCAB,) * 3)


SAMPLED = {
    "chain": lambda: two_model(small(1), num_tokens=2),
    "tree": lambda: two_model(small(1), tree=trees.parse("3x2")),
    "Jacobi": lambda: jacobi(VOCAB, window=2),
}


def counts(drafter, of):
    result = decode(
        of, drafter, [[2, 1]], key=jax.random.key(3), max_new_tokens=3, temperature=4.0, samples_per_prompt=4000,
        inputs=unconditional([[3]]),
    )  # fmt: skip
    index = np.asarray(result.to_lists()) @ np.array([VOCAB**2, VOCAB, 1])
    return np.bincount(index, minlength=VOCAB**3).reshape((VOCAB,) * 3)


@pytest.mark.parametrize("name", those({"tree"}, list(SAMPLED)))
def test_joint_law_of_three_sampled_tokens(name):
    assert chi_square(counts(SAMPLED[name](), guided(small(0), 2.5)), joint()) > 1e-3


def test_the_joint_law_without_guidance_is_another_one():
    assert chi_square(counts(SAMPLED["tree"](), guided(small(0), 1.0)), joint()) < 1e-6


def test_a_server_reads_a_prompt_and_an_unconditional_prompt_per_request():
    one = [unconditional([prompt], length=64) for prompt in EMPTY]
    requests = [
        specjax.Request(prompt, n, inputs=jax.tree.map(lambda x: x[0], one[n])) for n, prompt in enumerate(PROMPTS)
    ]
    texts = {n: [] for n in range(len(PROMPTS))}
    for served in specjax.serve(
        guided(tiny_llama(), 2.0), "prompt_lookup", requests, slots=2, longest_prompt=32, max_new_tokens=8,
        inputs=requests[0].inputs,
    ):  # fmt: skip
        assert served.error is None
        texts[served.request] += served.tokens
    of = guided(tiny_llama(), 2.0)
    expected = decode(of, autoregressive(), PROMPTS, key=0, max_new_tokens=8, inputs=unconditional(EMPTY))
    assert list(texts.values()) == expected.to_lists()


def test_equal_targets_share_a_model():
    assert guided(tiny_llama(), 2.0).model is guided(tiny_llama(), 3.0).model is _model(tiny_llama().model)


def test_what_it_refuses():
    for prompts in ([], [[]], [3], ["a"], [[1.5]], [[[1], [2, 3]]], None):
        with pytest.raises(UsageError, match="at least one token"):
            unconditional(prompts)
    with pytest.raises(UsageError, match="length must be a whole number of at least 2, not 1"):
        unconditional([[3, 4]], length=1)
    with pytest.raises(UsageError, match="scale must be at least 0 and finite, not -1"):
        guided(tiny_llama(), -1)
    with pytest.raises(UsageError, match="end must be a whole number of at least first, not 1"):
        guided(tiny_llama(), 2.0, first=3, end=1)
    with pytest.raises(UsageError, match="cannot be guided"):
        guided(target(), 2.0)
    with pytest.raises(UsageError, match="scale must be one number or one per prompt, 2"):
        decode(target(), autoregressive(), PROMPTS[:2], key=0, max_new_tokens=2, inputs=unconditional(EMPTY[:2]))
    with pytest.raises(UsageError, match="unconditional prompt 1 has the token 64, outside of the model's vocabulary"):
        decode(target(2.0), autoregressive(), PROMPTS[:2], key=0, max_new_tokens=2, inputs=unconditional([[1], [64]]))
    with pytest.raises(UsageError, match="needs inputs"):
        decode(target(), autoregressive(), PROMPTS, key=0, max_new_tokens=2)


def test_unconditional_prompts_fit_the_positions_of_the_model():
    """A prompt and its unconditional prompt have the same limit. `serve` refuses longer ones alone."""
    of = guided(tiny_llama(max_positions=64), 2.0)
    longest, longer = list(range(60)), list(range(61))
    decode(of, autoregressive(), [[3]], key=0, max_new_tokens=4, inputs=unconditional([longest]))
    with pytest.raises(UsageError, match="unconditional prompt 0 has 61 tokens and max_new_tokens is 4, more than the"):
        decode(of, autoregressive(), [[3]], key=0, max_new_tokens=4, inputs=unconditional([longer]))
    inputs = [jax.tree.map(lambda x: x[0], unconditional([prompt], length=64)) for prompt in (longer, longest)]
    requests = [specjax.Request([3], 0, inputs=entry) for entry in inputs]
    ends = {}
    for served in specjax.serve(
        of, "autoregressive", requests, slots=1, longest_prompt=8, max_new_tokens=4, inputs=inputs[0]
    ):
        if served.finish_reason is not None:
            ends[served.request] = served.finish_reason, served.error
    assert ends[0][0] == "refused" and "more than the 64 positions" in ends[0][1]
    assert ends[1] == ("length", None)


def test_a_step_does_not_copy_the_cache():
    """The temporary memory of a step is far below the size of its cache."""
    of = guided(tiny_llama(max_positions=8192), 2.0)
    job = prepare(
        of, jacobi(64, window=4), [[5, 6], [7]], Settings(capacity=8192), key=0, max_new_tokens=4000,
        inputs=unconditional([[1], [3, 4]]),
    )  # fmt: skip
    state = jax.eval_shape(start, job)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    assert step.lower(job.parts, state).compile().memory_analysis().temp_size_in_bytes < 0.1 * size


def test_a_model_with_images_reads_texts_under_guidance():
    """The guided texts are those of its text model. Images are refused."""
    reader = vision_target()
    config = LlamaConfig(**values_of(reader.model.config, dataclasses.fields(DecoderConfig)))
    params = {name: part for name, part in reader.params.items() if name not in ("tower", "connector")}
    options = {"key": 0, "max_new_tokens": 8, "inputs": unconditional([[3, 4]])}
    texts = [
        decode(guided(one, 3.0), "prompt_lookup", [[5, 6, 7]], **options).to_lists()
        for one in (reader, specjax.Target(make_model(config), params))
    ]
    assert texts[0] == texts[1] != decode(reader, None, [[5, 6, 7]], key=0, max_new_tokens=8).to_lists()
    inputs = images(reader, [[5, 6]], [None], num_tiles=1)
    with pytest.raises(UsageError, match="reads texts only under guidance"):
        options |= {"inputs": unconditional([[3]], inputs=(inputs, inputs))}
        decode(guided(reader, 3.0), None, [[5, 6]], **options)
