"""Mixtures of experts that transformers wrote: parity, mistakes of readers, and the uses of a loaded model."""

import dataclasses

import jax
import numpy as np
import pytest
from expert_models import MAKERS, logits_of, save
from hybrid_logits import whole_text_logits

import specjax
from specjax import drafters, models
from specjax.errors import UsageError
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats import hf
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.tensors.assembly import assemble, check_tensors

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24))
_logits = jax.jit(whole_text_logits, static_argnums=0)


@pytest.fixture(scope="module", params=list(MAKERS))
def case(request, tmp_path_factory):
    """Return the folder, the checkpoint and the logits in transformers of a model."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = save(request.param, folder)
    fields = hf.read_config(folder)
    checkpoint = hf.read(folder, fields, dtype="float32", name=request.param)
    assert describe_unread(fields) == ()
    check_tensors(checkpoint)
    return folder, checkpoint, logits_of(reference, TOKENS)


def error(checkpoint, expected):
    """Return the largest difference of logits, divided by the tolerance of parity."""
    logits = _logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS)
    return np.abs(np.asarray(logits) - expected).max() / (1e-5 * max(1.0, np.abs(expected).max()))


def test_parity_and_mistakes(case):
    _, checkpoint, expected = case
    assert error(checkpoint, expected) < 1
    stored, names = checkpoint.stored, [f"layers.*.mlp.{part}.weight" for part in mixtures.PARTS]
    gate, up, _ = names
    swapped = stored | {gate: stored[up], up: stored[gate]}
    assert error(checkpoint._replace(stored=swapped), expected) > 20, "gate and up of each expert"
    router = "layers.*.mlp.router.weight"
    turned = stored | {router: stored[router]._replace(order=np.roll(np.arange(8), 1))}
    assert error(checkpoint._replace(stored=turned), expected) > 20, "experts in another order"


def test_other_routing_changes_the_logits(case):
    _, checkpoint, expected = case
    sizes = checkpoint.config.experts
    routing = sizes.routing._replace(normalized=not sizes.routing.normalized)
    config = dataclasses.replace(checkpoint.config, experts=sizes._replace(routing=routing))
    assert error(checkpoint._replace(config=config), expected) > 20


def test_saved_and_loaded(case, tmp_path):
    _, checkpoint, expected = case
    target = specjax.Target(models.make_model(checkpoint.config), assemble(checkpoint))
    save_model(tmp_path, target)
    again = hf.read(tmp_path, dtype="float32", name=checkpoint.config.name)
    check_tensors(again)
    assert again.config == checkpoint.config
    assert error(again, expected) < 1


def test_drafted_text_equals_plain_text(case):
    _, checkpoint, _ = case
    target = specjax.Target(models.make_model(checkpoint.config), assemble(checkpoint))
    prompts = [list(range(12)) * 2, [5, 6, 7, 5, 6, 7, 5, 6]]
    decode = lambda drafter: specjax.decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=24)
    plain, drafted = decode(drafters.autoregressive()), decode(drafters.token_recycling(64, num_nodes=12))
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


CONFLICTS = {
    "make them equal": {"num_experts": 8, "num_local_experts": 4},
    "must be at most 8": {"num_experts_per_tok": 9},
    "must be layers from 0 to 1": {"mlp_only_layers": [2]},
    "has experts in none of its 2 layers": {"mlp_only_layers": [0, 1]},
}


@pytest.mark.parametrize("message", CONFLICTS)
def test_configs_that_are_refused(message):
    fields = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 16}
    with pytest.raises(UsageError, match=message):
        hf.parse_config(ConfigFields(fields | CONFLICTS[message], "config.json"), dtype="float32")


def test_same_bits_is_refused():
    fields = ConfigFields({"model_type": "mixtral"}, "config.json")
    with pytest.raises(UsageError, match="sums over experts"):
        hf.parse_config(fields, dtype="bfloat16", same_bits=True)
