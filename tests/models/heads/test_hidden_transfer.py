"""Hidden Transfer against the authors' pass, which runs the text and the predicted states together."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_runs import LENGTH, PATH, TEXT, draft, random_params
from toy import markov, tiny_llama

from specjax import Target, UsageError, decode, drafters
from specjax.models.heads.contract import DraftHead, FeaturePairs
from specjax.models.heads.hidden_transfer import HiddenTransferConfig, hidden_transfer_head
from specjax.types import Context, Stream, Sublayers

WIDTH, LAYERS = 32, 2


@functools.partial(jax.jit, static_argnums=0)
def said(head, params, target: Target):
    """Return logits float32[B, 1 + D, V] of a draft after TEXT, and the target's float32[B, T, V] for TEXT."""
    model, text, size = target.model, jnp.asarray(TEXT), TEXT.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), text.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (len(text), size, size))
    cache, length = model.init_cache(target.params, None, len(text), 32), jnp.asarray(LENGTH)
    output, pending = model.forward(target.params, text, cache, positions=positions, mask=mask, taps=head.taps)
    context = Context(text, length, cache=model.commit(cache, pending, positions, length - 1), target=target)
    pairs = FeaturePairs(head.features_of(output), jnp.roll(text, -1, 1), length - 1)
    memory = head.read(params, head.init_memory(params, context, len(text), 32), pairs, context)
    return draft(head, params, memory, context, jnp.asarray(PATH)), output.logits


@jax.jit
def one_layer(target: Target, x, number, positions, mask):
    """Return the stream [T, D] of all tokens after a layer, without a cache."""
    runs = (jnp.arange(LAYERS) == number)[None]
    cache = target.model.init_cache(target.params, None, 1, len(x))
    output, _ = target.model.forward(
        target.params, Stream(x[None]), cache, positions=positions[None], mask=mask[None],
        layers=Sublayers(runs, runs), taps=(LAYERS,),
    )  # fmt: skip
    return output.taps[0][0]


def side_by_side(config: HiddenTransferConfig, params, target: Target, text, length: int) -> np.ndarray:
    """Return the logits float32[T + K, V], layer by layer, of the first tokens of a text and K predicted states."""
    count, size = len(text), len(text) + len(config.behind)
    embedded = target.model.embed(target.params, jnp.asarray(text)[None])[0]
    x = jnp.concatenate([embedded, jnp.zeros((len(config.behind), config.width))])
    positions = np.concatenate([np.arange(count), length + np.arange(len(config.behind))])
    for number in range(LAYERS + 1):
        for i, behind in enumerate(config.behind):
            if behind == number:
                x = x.at[count + i].set(params["transfers"][i]["weight"] @ x[length - 1])
        if number < LAYERS:
            is_valid = np.array(
                [place < length for place in range(count)] + [layer <= number for layer in config.behind]
            )
            mask = np.tril(np.ones((size, size), bool)) & is_valid | np.eye(size, dtype=bool)
            x = one_layer(target, x, number, positions, mask)
    return np.asarray(target.model.head(target.params, x[None])[0])


def test_drafts_are_those_of_the_pass_over_text_and_states_side_by_side():
    """The predicted states do not change the target's outputs for the text."""
    config, target = HiddenTransferConfig(WIDTH, (1, 2, 0, 1)), tiny_llama()
    params = random_params("hidden_transfer", config)
    ours, plain = said(hidden_transfer_head(config), params, target)
    for b, n in enumerate(LENGTH):
        together = side_by_side(config, params, target, TEXT[b], n - 1)
        near = functools.partial(np.testing.assert_allclose, atol=1e-4 * np.abs(together).max())
        near(ours[b], together[TEXT.shape[1] :])
        near(plain[b, : n - 1], together[: n - 1])
    params["transfers"][1]["weight"] = np.eye(WIDTH, dtype=np.float32)
    same, _ = said(hidden_transfer_head(config), params, target)
    last = plain[np.arange(len(TEXT)), LENGTH - 2]  # behind all layers, a state that is left as it is is the last one
    np.testing.assert_allclose(same[:, 1], last, atol=1e-4 * np.abs(last).max())


def test_powers_of_a_permutation_are_always_right():
    """The target's layers add zero, and its output layer adds 3 to each token. W_i does that i times."""
    idle = tiny_llama(vocab=WIDTH)
    params = jax.tree.map(np.array, idle.params)
    for layer in params["layers"].values():
        layer["attention"]["o"]["weight"][:] = layer["mlp"]["down"]["weight"][:] = 0
    move = np.roll(np.eye(WIDTH, dtype=np.float32), 3, 0)
    params["embed"]["weight"], params["head"]["weight"] = np.eye(WIDTH, dtype=np.float32), 9 * move
    target = Target(idle.model, params)
    powers = {i: {"weight": np.linalg.matrix_power(move, i + 1)} for i in range(3)}
    head = DraftHead(hidden_transfer_head(HiddenTransferConfig(WIDTH, (1, 1, 2))), {"transfers": powers})
    prompts = [[4, 7], [9, 1, 4, 7]]
    result = decode(target, drafters.head_drafter(head), prompts, key=0, max_new_tokens=20)
    assert result.to_lists()[0] == [(7 + 3 * i) % WIDTH for i in range(1, 21)]
    assert result.stats.target_passes.tolist() == [5, 5]


def test_a_target_that_cannot_is_refused():
    config = HiddenTransferConfig(WIDTH, (3,))
    head = DraftHead(hidden_transfer_head(config), random_params("hidden_transfer", config))
    with pytest.raises(UsageError, match=r"after layer 3 of its target, but the model llama has 2 layers"):
        decode(tiny_llama(), drafters.head_drafter(head), [[1, 2]], key=0, max_new_tokens=2)
    model = markov().model
    closed = Target(model._replace(capabilities=model.capabilities._replace(streams=False)), markov().params)
    config = replace(config, width=7, behind=(1,))
    head = DraftHead(hidden_transfer_head(config), random_params("hidden_transfer", config))
    with pytest.raises(UsageError, match="cannot run its layers on given states"):
        decode(closed, drafters.head_drafter(head), [[1, 2]], key=0, max_new_tokens=2)
