"""Assistants of Gemma 4 against the classes of transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gemma4_models import LAYERS, SIZES, gemma4, torch, transformers
from toy import tiny_llama

import specjax
from specjax import models
from specjax.drafters.heads.head_drafter import head_drafter
from specjax.errors import UsageError
from specjax.models.heads import gemma4_assistant
from specjax.models.heads.blocks import abstract_params
from specjax.models.heads.contract import DraftedNodes, DraftHead
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.gemma4 import config_from_hf
from specjax.models.loading.formats import hf
from specjax.models.loading.tensors.assembly import assemble
from specjax.types import Context, Target

STEPS, CLUSTERS, CHOSEN = 3, 8, 3
TEXT = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, 20))
SHAPES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "layer_types": LAYERS,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "num_key_value_heads": 1, "final_logit_softcapping": None,
}  # fmt: skip
NAMES = {
    "mixer_norm": "input_layernorm", "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm", "scale": "layer_scalar",
    "attention": "self_attn", "q": "q_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
    "input": "pre_projection", "output": "post_projection", "norm": "model.norm", "head": "lm_head",
    "clusters": "masked_embedding", "order": "token_ordering", "stack": "model.layers",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    few = {"num_hidden_layers": 3, "layer_types": [*LAYERS, "full_attention"], "num_kv_shared_layers": 1}
    reference, folder = gemma4("small", **few).eval(), tmp_path_factory.mktemp("target")
    reference.save_pretrained(folder)
    checkpoint = hf.read(folder, dtype="float32", stacked=False)
    return reference, Target(models.make_model(checkpoint.config), assemble(checkpoint))


@pytest.fixture(scope="module")
def assistant():
    """Return an assistant of transformers, and its config and parameters here."""
    torch.manual_seed(1)
    text = transformers.Gemma4TextConfig(**SIZES | SHAPES)
    reference = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=SIZES["hidden_size"], use_ordered_embeddings=True,
            num_centroids=CLUSTERS, centroid_intermediate_top_k=CHOSEN,
        )
    ).eval()  # fmt: skip
    for parameter in reference.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    reference.masked_embedding.token_ordering.copy_(torch.randperm(SIZES["vocab_size"]))
    for i, layer in enumerate(reference.model.layers):
        layer.layer_scalar.fill_(0.8 + 0.1 * i)
    fields = ConfigFields(text.to_dict() | {"num_kv_shared_layers": 0}, "config.json")
    decoder = config_from_hf(fields, dtype="float32")
    config = gemma4_assistant.AssistantConfig(decoder, SIZES["hidden_size"], CLUSTERS, CHOSEN)
    tensors = {name.removesuffix(".weight"): jnp.asarray(x.numpy()) for name, x in reference.state_dict().items()}

    def find(path, shape):
        keys = [str(part.key) for part in path if part.key != "weight"]
        return tensors[".".join(NAMES.get(key, key) for key in keys)].reshape(shape.shape)

    params = jax.tree_util.tree_map_with_path(find, abstract_params(gemma4_assistant.Gemma4Assistant, config))
    return reference, config, params


def drafted_logits(config, params, target):
    """Return the logits [STEPS, V] of a chain of likeliest tokens after TEXT."""
    head, (model, weights) = gemma4_assistant.assistant_head(config), (target.model, target.params)

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

    return np.asarray(jax.jit(run)(params, weights, jnp.asarray(TEXT)))


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


def difference(logits, expected):
    """Return the largest difference among drafted tokens; tokens of other clusters have the least logit minus 1."""
    is_drafted = np.isfinite(logits)
    assert (is_drafted.sum(-1) == CHOSEN * SIZES["vocab_size"] // CLUSTERS).all()
    minimum = np.where(is_drafted, logits, np.inf).min(-1, keepdims=True) - 1
    return np.abs(np.where(is_drafted, logits, minimum) - expected).max()


def test_logits_and_their_rules(target, assistant):
    (reference, loaded), (of_transformers, config, params) = target, assistant
    expected = expected_logits(reference, of_transformers)
    assert difference(drafted_logits(config, params, loaded), expected) < 1e-4
    decoder = config.decoder
    weight = params["input"]["weight"]
    swapped = params | {"input": {"weight": jnp.roll(weight, weight.shape[1] // 2, 1)}}
    mutants = [
        (config, swapped),  # [h; E x]
        (dataclasses.replace(config, decoder=dataclasses.replace(decoder, window=decoder.window - 1)), params),
        (config, params | {"clusters": params["clusters"] | {"order": params["clusters"]["order"][::-1]}}),
    ]
    for changed, arrays in mutants:
        assert difference(drafted_logits(changed, arrays, loaded), expected) > 1e-2


@pytest.mark.exhaustive
def test_greedy_text_is_that_of_the_target(target, assistant):
    loaded, (_, config, params) = target[1], assistant
    head = DraftHead(gemma4_assistant.assistant_head(config), params)
    prompts = [[1, 2, 3, 4, 5], [6]]
    plain, drafted = (
        specjax.decode(loaded, drafter, prompts, key=0, max_new_tokens=16) for drafter in (None, head_drafter(head, 2))
    )
    assert jnp.array_equal(plain.tokens, drafted.tokens)


def test_a_target_that_shares_no_keys_is_refused_by_name(assistant):
    _, config, params = assistant
    head = DraftHead(gemma4_assistant.assistant_head(config), params)
    other = tiny_llama()
    with pytest.raises(UsageError, match="shares no keys of its cache, which gemma4_assistant needs"):
        specjax.decode(other, head_drafter(head, 2), [[1, 2, 3]], key=0, max_new_tokens=4)
