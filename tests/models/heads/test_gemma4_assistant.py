"""Assistants of Gemma 4 against the classes of transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma4_models import CHOSEN, CLUSTERS, FEW, SIZES, assistant, copying_pair, gemma4, loaded, torch
from rules import takes_all
from tiers import exhaustive
from toy import chi_square, tiny_llama
from toy_models import law_of_triples

import specjax
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.errors import UsageError
from specjax.models.heads import gemma4_assistant
from specjax.models.heads.contract import DraftedNodes
from specjax.models.heads.recurrent import recurrent
from specjax.models.loading.heads import read_head
from specjax.training.objectives.trainables import build_head_objective
from specjax.types import Context, Target

STEPS = 3
TEXT = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, 20))


def loaded_pair(tmp_path_factory, **changes):
    """Return a target of transformers, the same here, and the head of an assistant that copies its last layers."""
    torch.manual_seed(3)
    reference, copy = copying_pair(**changes)
    folder, target = tmp_path_factory.mktemp("assistant"), loaded(reference, tmp_path_factory.mktemp("target"))
    copy.save_pretrained(folder)
    return reference, target, read_head(folder, target).head


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    reference = gemma4("small", **FEW).eval()
    return reference, loaded(reference, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(target, tmp_path_factory):
    """Return an assistant of transformers, and the head that its folder loads as."""
    torch.manual_seed(1)
    reference, folder = assistant(), tmp_path_factory.mktemp("assistant")
    reference.save_pretrained(folder)
    return reference, read_head(folder, target[1]).head


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return loaded_pair(tmp_path_factory)


@functools.cache
def drafting(head, model):
    """Return a function of both parameters that returns the logits [STEPS, V] of a chain of likeliest tokens."""

    @jax.jit
    def run(params, weights, tokens):
        count = tokens.shape[1] - 1
        places, mask = jnp.arange(count)[None], jnp.tril(jnp.ones((1, count, count), bool))
        cache = model.init_cache(weights, None, 1, 128)
        output, pending = model.forward(weights, tokens[:, :-1], cache, positions=places, mask=mask)
        cache = model.commit(cache, pending, places, jnp.array([count]))
        context = Context(tokens, jnp.array([count + 1]), cache=cache, target=Target(model, weights))
        scratch, logits = head.start(params, output.hidden[:, -1], context, STEPS)
        chain = [logits[0]]
        for depth in range(1, STEPS):
            token, place = jnp.argmax(chain[-1])[None, None], jnp.full((1, 1), depth)
            nodes = DraftedNodes(token, place, jnp.int32(depth), place - 1, jnp.zeros((1, 1, STEPS), bool))
            scratch, logits = head.follow(params, scratch, nodes, context)
            chain.append(logits[0, 0])
        return jnp.stack(chain)

    return run


def drafted_logits(head, params, target):
    """Return the logits [STEPS, V] of a chain of likeliest tokens after TEXT."""
    return np.asarray(drafting(head, target.model)(params, target.params, jnp.asarray(TEXT)))


def expected_logits(target, assistant):
    tokens, chain = torch.tensor(TEXT), []
    with torch.no_grad():
        output = target(tokens[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        hidden, token = output.hidden_states[-1][:, -1:], tokens[:, -1:]
        for _ in range(STEPS):
            inputs = torch.cat([target.get_input_embeddings()(token), hidden], -1)
            step = assistant(
                inputs_embeds=inputs, position_ids=torch.tensor([[TEXT.shape[1] - 1]]),
                shared_kv_states=dict(output.shared_kv_states),
            )  # fmt: skip
            token, hidden = step.logits.argmax(-1), step.last_hidden_state
            chain.append(step.logits[0, 0].numpy())
    return np.stack(chain)


def differences(logits, expected):
    """Return the largest difference among drafted tokens at each depth.

    Tokens of other clusters have the least logit minus 1 in `expected`.
    """
    is_drafted = np.isfinite(logits)
    assert (is_drafted.sum(-1) == CHOSEN * SIZES["vocab_size"] // CLUSTERS).all()
    minimum = np.where(is_drafted, logits, np.inf).min(-1, keepdims=True) - 1
    return np.abs(np.where(is_drafted, logits, minimum) - expected).max(-1)


def likeliest_text(model, prompt, count):
    """Return the `count` tokens that a model of transformers continues a prompt with."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return tokens[0, len(prompt) :].tolist()


class GrowingPosition(gemma4_assistant.Gemma4Assistant):
    """A mutant whose drafted tokens have the positions after that of the root."""

    def below(self, state, tokens, depth, context):
        return super().below(state, tokens, depth, context._replace(length=context.length + depth[:, 0]))


def test_logits_and_their_rules(target, head):
    (reference, read), (of_transformers, draft_head) = target, head
    expected, params, config = expected_logits(reference, of_transformers), draft_head.params, draft_head.head.config
    assert differences(drafted_logits(draft_head.head, params, read), expected).max() < 1e-4
    decoder, weight = config.decoder, params["input"]["weight"]
    narrower = dataclasses.replace(config, decoder=dataclasses.replace(decoder, window=decoder.window - 1))
    swapped = params | {"input": {"weight": jnp.roll(weight, weight.shape[1] // 2, 1)}}
    mutants = [
        (draft_head.head, swapped),  # [h; E x]
        (gemma4_assistant.assistant_head(narrower), params),
        (draft_head.head, params | {"clusters": params["clusters"] | {"order": params["clusters"]["order"][::-1]}}),
    ]
    for mutant, arrays in mutants:
        assert differences(drafted_logits(mutant, arrays, read), expected).max() > 1e-2


def test_the_position_of_the_root_is_that_of_all_drafted_tokens(target, head):
    expected, draft_head = expected_logits(target[0], head[0]), head[1]
    mutant = recurrent(gemma4_assistant.NAME, GrowingPosition, draft_head.head.config)
    first, *later = differences(drafted_logits(mutant, draft_head.params, target[1]), expected)
    assert first < 1e-4 and max(later) > 1e-2


@pytest.mark.parametrize("method", ["gemma4_assistant", exhaustive("auto")])
def test_greedy_text_is_that_of_the_target_and_drafts_are_accepted(method, pair):
    reference, target, head = pair
    prompt, count = [1, 2, 3, 4, 5], 24
    drafter = specjax.make_drafter(method, target, head, **({"num_tokens": 2} if method != "auto" else {}))
    result = specjax.decode(target, drafter, [prompt], key=0, max_new_tokens=count)
    expected = likeliest_text(reference, prompt, count)
    assert result.to_lists() == [expected] and len(set(expected)) > 4
    assert int(result.stats.accepted.sum()) > 5 and int(result.stats.target_passes[0]) < 0.75 * count


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", [None, "2x1"])
def test_a_sampled_draft_has_the_law_of_the_target(tree, tmp_path_factory):
    _, target, head = loaded_pair(tmp_path_factory, vocab_size=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    # The drafts of other tokens than the likeliest give the mutant another law.
    other = {"head": jax.tree.map(lambda x: jnp.roll(x, 1, 0), head.params["head"])}
    head = head.replace(params=head.params | other)
    drafter = head_drafter(head, 2, tree=tree and specjax.trees.parse(tree))
    law = law_of_triples(target, [1, 0, 2, 1], temperature=1.5)

    def counts(**changes):
        options = {"key": jax.random.key(7), "max_new_tokens": 3, "temperature": 1.5, "samples_per_prompt": 2000}
        result = specjax.decode(target, drafter, [[1, 0, 2, 1]], **options | changes)
        assert int(result.stats.accepted.sum()) > 0
        return np.bincount(np.asarray(result.tokens) @ np.array([9, 3, 1]), minlength=27).reshape(3, 3, 3)

    assert chi_square(counts(), law) > 1e-3
    assert chi_square(counts(verifier=takes_all), law) < 1e-6


def test_a_target_that_shares_no_keys_is_refused_by_name(head):
    with pytest.raises(UsageError, match="shares no keys of its cache, which gemma4_assistant needs"):
        specjax.decode(tiny_llama(), head_drafter(head[1], 2), [[1, 2, 3]], key=0, max_new_tokens=4)


def test_training_and_shapes_of_a_target_are_refused_by_name(head):
    with pytest.raises(UsageError, match="does not train heads of gemma4_assistant; choose one of"):
        build_head_objective(head[1].head)
    with pytest.raises(UsageError, match="makes no gemma4_assistant for"):
        gemma4_assistant.KIND.of_target(tiny_llama().model.config)
