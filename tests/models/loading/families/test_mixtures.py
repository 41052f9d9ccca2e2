"""Mixtures of experts of transformers in the published form: parity, mistakes of readers, and the uses of a model."""

import dataclasses
import json

import gguf_files
import hybrid_gguf
import jax
import numpy as np
import pytest
import shipped_mixture
from expert_models import PUBLISHED, fields_of, logits_of, make, save
from hybrid_logits import whole_text_logits
from tiers import exhaustive, those

import specjax
from specjax import drafters, models
from specjax.errors import UsageError
from specjax.models.experts.sizes import TokenShuffling
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.model_classes import check_own_code
from specjax.models.loading.families.unread_fields import describe_unread
from specjax.models.loading.formats import gguf, hf
from specjax.models.loading.formats.writing import save_model
from specjax.models.loading.tensors.assembly import assemble, check_tensors
from specjax.models.loading.tensors.file_formats import with_file_formats
from specjax.models.storage import quantized_config
from specjax.numerics.quantized_array import as_float_weights, is_quantized
from specjax.planning.description.model import describe_model
from specjax.planning.description.words import describe_in_lines

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24))
_logits = jax.jit(whole_text_logits, static_argnums=0)


QUICK = {"qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "granitemoehybrid", "glm4_moe", "deepseek_v3"}


@pytest.fixture(scope="module", params=those(QUICK, list(PUBLISHED)))
def case(request, tmp_path_factory):
    """Return the family, the checkpoint and the logits in transformers of a model."""
    folder = tmp_path_factory.mktemp(request.param)
    reference = save(request.param, folder)
    fields = hf.read_config(folder)
    checkpoint = hf.read(folder, fields, dtype="float32", name=request.param)
    assert describe_unread(fields) == ()
    check_own_code(fields)
    check_tensors(checkpoint)
    return request.param, checkpoint, logits_of(reference, TOKENS)


def error(checkpoint, expected):
    """Return the largest difference of logits, divided by the tolerance of parity."""
    logits = _logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS)
    return np.abs(np.asarray(logits) - expected).max() / (1e-5 * max(1.0, np.abs(expected).max()))


def test_parity(case):
    _, checkpoint, expected = case
    assert error(checkpoint, expected) < 1


VARIANTS = {
    "DeepSeek-V2": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 24,
            "routed_scaling_factor": 16.0,
        },
    ),
    "GLM-4.5": ("glm4_moe", {"use_qk_norm": True, "routed_scaling_factor": 2.5}),
    "Granite 3 with a shared MLP": ("granitemoeshared", {}),
    "Qwen3-MoE with raw weights": ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
}  # fmt: skip
"""Published members of the families whose configs have other rules."""


@pytest.mark.parametrize("name", VARIANTS)
def test_parity_of_other_members(name, tmp_path):
    kind, changes = VARIANTS[name]
    reference = save(kind, tmp_path, **changes)
    checkpoint = hf.read(tmp_path, dtype="float32", name=kind)
    check_tensors(checkpoint)
    expected = logits_of(reference, TOKENS)
    assert error(checkpoint, expected) < 1
    assert error(_stored(ROUTER + "weight", order=np.roll(np.arange(8), 1))(checkpoint), expected) > 20


def _stored(path, **changes):
    """Return a change of the form of one stored tensor."""
    return lambda c: c._replace(stored=c.stored | {path: c.stored[path]._replace(**changes)})


def _exchanged(first, second):
    return lambda c: c._replace(stored=c.stored | {first: c.stored[second], second: c.stored[first]})


def _config(**changes):
    return lambda c: c._replace(config=dataclasses.replace(c.config, **changes))


def _sizes(**changes):
    return lambda c: _config(experts=c.config.experts._replace(**changes))(c)


def _routing(**changes):
    return lambda c: _sizes(routing=c.config.experts.routing._replace(**changes))(c)


def _other_normalisation(c):
    return _routing(normalized=not c.config.experts.routing.normalized)(c)


def _latent(**changes):
    return lambda c: _config(latent=c.config.latent._replace(**changes))(c)


GATE, UP, DOWN = (f"layers.*.mlp.{part}.weight" for part in mixtures.PARTS)
ROUTER = "layers.*.mlp.router."
OF_ALL = {
    "gate and up of each expert": _exchanged(GATE, UP),
    "experts in another order": _stored(ROUTER + "weight", order=np.roll(np.arange(8), 1)),
}
OF_SCORES = {"normalised or not": _other_normalisation}  # the weights of Granite and gpt-oss have the sum 1
MISTAKES = {
    "qwen3_next": {
        "shared MLP without its gate": _sizes(shared_gate=False),
        "no norm of 1 + w": _stored("layers.*.mlp_norm.weight", add=0.0),
    },
    "qwen3_5_moe_text": {"shared MLP without its gate": _sizes(shared_gate=False)},
    "gpt_oss": {
        "gates first": lambda c: _stored(GATE, order=np.arange(64))(_stored(UP, order=np.arange(64, 128))(c)),
        "no clamps": _sizes(limit=1e9),
        "gated silu": _sizes(limit=None),
        "no sinks": _config(sinks=False),
        "full attention first": lambda c: _config(is_global=(True, False))(c),
        "a window that is one longer": _config(window=5),
        "YaRN with whole dimensions": lambda c: _config(rope_scaling=c.config.rope_scaling._replace(whole=True))(c),
        "YaRN without its amplitude": lambda c: _config(rope_scaling=c.config.rope_scaling._replace(amplitude=1.0))(c),
        "no bias of the output": _config(out_bias=False),
        "no bias of queries, keys and values": _config(qkv_bias=False),
        "no bias of the router": _sizes(router_bias=False),
        "no biases of experts": _sizes(bias=False),
        "softmax before the choice": _routing(scores="softmax"),
    },
    "granitemoe": {"softmax before the choice": _routing(scores="softmax")},
    "granitemoehybrid": {"softmax before the choice": _routing(scores="softmax")},
    "glm4_moe": {
        "no correction": _sizes(correction=False),
        "softmax": _routing(scores="softmax"),
        "all numbers rotated": _config(rotary_dim=None),
        "no bias of queries, keys and values": _config(qkv_bias=False),
    },
    "deepseek_v2": {
        "YaRN without sharper scores": _latent(mscale=0.0),
        "halves rotated in files": lambda c: _reread(_latent(interleaved=False)(c)),
        "values before keys": _exchanged("layers.*.attention.k_up.weight", "layers.*.attention.v_up.weight"),
    },
    "deepseek_v3": {
        "no correction": _sizes(correction=False),
        "no groups": _routing(num_groups=1, num_chosen_groups=1),
        "groups by their maximum": _routing(group_score="maximum"),
        "another scale": _routing(scale=1.0),
        "YaRN without sharper scores": _latent(mscale=0.0),
    },
}
HAVE_SUM_1 = "gpt_oss", "granitemoe", "granitemoehybrid"
MISTAKES = {kind: OF_ALL | MISTAKES.get(kind, {}) | ({} if kind in HAVE_SUM_1 else OF_SCORES) for kind in PUBLISHED}


def _reread(checkpoint):
    """Return a checkpoint with the tensors that its config implies."""
    return checkpoint._replace(stored=hf.registry.by_config(checkpoint.config).stored_hf(checkpoint.config, ""))


@pytest.mark.parametrize("in_config", [False, exhaustive(True)])
def test_mistakes_change_the_logits(case, in_config):
    """Mistakes in the reading of tensors, and those in the config, each of which is another program."""
    kind, checkpoint, expected = case
    changed = {name: change(checkpoint) for name, change in MISTAKES[kind].items()}
    changed = {name: c for name, c in changed.items() if (c.config != checkpoint.config) == in_config}
    small = {name: error(c, expected) for name, c in changed.items()}
    assert min(small.values()) > 20, small


def test_the_norm_of_latents_has_its_own_epsilon(tmp_path, monkeypatch):
    reference = save("deepseek_v3", tmp_path, rms_norm_eps=1e-2)
    checkpoint = hf.read(tmp_path, dtype="float32", name="deepseek_v3")
    assert error(checkpoint, logits_of(reference, TOKENS)) < 1


def test_saved_and_loaded(case, tmp_path):
    _, checkpoint, expected = case
    target = specjax.Target(models.make_model(checkpoint.config), assemble(checkpoint))
    save_model(tmp_path, target)
    again = hf.read(tmp_path, dtype="float32", name=checkpoint.config.name)
    check_tensors(again)
    assert again.config == checkpoint.config
    assert error(again, expected) < 1


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("gpt_oss", "int8"), ("qwen3_5_moe_text", "int4-weights"), exhaustive("granitemoehybrid", "int8-weights"),
        exhaustive("granitemoe", "fp8"), exhaustive("gpt_oss", "int4-weights"), exhaustive("qwen3_moe", "int8"),
    ],
)  # fmt: skip
def test_quantised_experts_are_saved(kind, scheme, tmp_path):
    """The matrices of experts are separate in such a file, also in families that stack them."""
    save(kind, tmp_path / "floats")
    floats = hf.read(tmp_path / "floats", dtype="float32", name=kind)
    config = quantized_config(floats.config, scheme, "cpu")
    params = assemble(floats._replace(config=config))
    save_model(tmp_path / "saved", specjax.Target(models.make_model(config), params))
    again = hf.read(tmp_path / "saved", dtype="float32", name=kind)
    check_tensors(again)
    in_formats = again._replace(config=with_file_formats(again, "cpu"))
    loaded = assemble(in_formats)
    assert is_quantized(loaded["layers"][1]["mlp"]["expert_down"]["weight"])
    jax.tree.map(np.testing.assert_array_equal, as_float_weights(loaded), as_float_weights(params))
    expected = np.asarray(_logits(models.make_model(config), params, TOKENS))
    assert error(in_formats, expected) < 1 and error(floats, expected) > 20


def test_groups_of_experts_are_not_saved(tmp_path):
    target = shipped_mixture.shipped_mixture()
    config = target.model.config
    config = dataclasses.replace(config, experts=config.experts._replace(shuffling=TokenShuffling(2, 384, 0.5)))
    with pytest.raises(UsageError, match=r"^mixture has experts in groups for devices, .* group_experts received$"):
        save_model(tmp_path, specjax.Target(models.make_model(config), target.params))


@pytest.mark.exhaustive
def test_every_pass_computes_the_same(case):
    """Prefill, single tokens, trees and pending tokens have equal logits."""
    _, checkpoint, _ = case
    check = specjax.check_model(models.make_model(checkpoint.config), assemble(checkpoint), tolerance=2e-4)
    assert check, str(check)


@pytest.mark.exhaustive
def test_drafted_text_equals_plain_text(case):
    _, checkpoint, _ = case
    target = specjax.Target(models.make_model(checkpoint.config), assemble(checkpoint))
    prompts = [list(range(12)) * 2, [5, 6, 7, 5, 6, 7, 5, 6]]
    decode = lambda drafter: specjax.decode(target, drafter, prompts, key=jax.random.key(0), max_new_tokens=24)
    plain, drafted = decode(drafters.autoregressive()), decode(drafters.token_recycling(64, num_nodes=12))
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


WORDS = {
    "qwen3_moe": "1 attention layer with a gated MLP and 1 attention layer with a mixture of experts",
    "mixtral": "2 of 8 for each token, 16 hidden units each",
    "olmoe": "2 attention layers, each with a mixture of experts",
    "qwen3_next": "3 of 8 for each token, 16 hidden units each, and a shared MLP of 24",
    "qwen3_5_moe_text": "1 gated delta net and 1 attention layer (layer 1, counted from 0), each with a mixture",
    "gpt_oss": "16 numbers rotated, windows of 4 tokens, attention sinks",
    "granitemoe": "3 of 8 for each token, 16 hidden units each",
    "granitemoehybrid": "1 Mamba-2 layer and 1 attention layer",
    "glm4_moe": "8 numbers rotated",
    "deepseek_v2": "latent attention: 4 heads, 20 cached numbers per token and layer, 4 of them rotated, values of 12",
    "deepseek_v3": "values of 12, queries from vectors of 24",
}  # fmt: skip


@pytest.mark.parametrize("kind", those({"qwen3_next", "gpt_oss", "deepseek_v3"}, list(PUBLISHED)))
def test_inspect_describes_the_model(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields_of(kind)))
    model = describe_model(tmp_path)
    text = "\n".join(describe_in_lines(model))
    assert WORDS[kind] in text and model.active_parameters < model.parameters, text
    if kind.startswith("deepseek"):
        assert model.memory.per_token == 2 * 20 * 4, "one array of cached numbers, in two layers"


OF_GGUF = {
    **dict.fromkeys(["qwen3_moe", "mixtral", "olmoe"], gguf_files.write),
    **dict.fromkeys(["qwen3_next", "qwen3_5_moe_text"], hybrid_gguf.write),
}
"""Writers of GGUF files by family."""


@pytest.mark.parametrize("kind", those({"mixtral", "qwen3_5_moe_text"}, list(OF_GGUF)))
def test_gguf(kind, tmp_path):
    """Experts are one tensor of each kind of matrix. Blocks of Q8_0 stay quantised on request."""
    changes = {} if kind in ("mixtral", "olmoe") else {"mlp_only_layers": [], "moe_intermediate_size": 32}
    model = make(kind, intermediate_size=32, **changes)
    file = OF_GGUF[kind](model, tmp_path / "model.gguf")
    checkpoint, _ = gguf.read(file, dtype="float32", name=kind)
    check_tensors(checkpoint)
    expected = logits_of(model, TOKENS)
    assert error(checkpoint, expected) < 1
    assert error(_exchanged(GATE, UP)(checkpoint), expected) > 20
    file = OF_GGUF[kind](model, tmp_path / "blocks.gguf", kind="Q8_0")
    expanded, _ = gguf.read(file, dtype="float32", name=kind)
    check_tensors(expanded)
    quantized = expanded._replace(config=with_file_formats(expanded, "cpu"))
    assert assemble(quantized)["layers"][0]["mlp"]["expert_up"]["weight"].scales.shape == (8, 32, 1)
    logits = _logits(models.make_model(expanded.config), assemble(expanded), TOKENS)
    assert error(quantized, np.asarray(logits)) < 1
    assert 20 < error(quantized, expected) < 2e4


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


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_groups_of_one_expert_have_no_two_best(kind):
    """transformers fails in its first pass, so no text of such a model exists. Groups by their maximum have a score."""
    with pytest.raises(RuntimeError, match="out of range"):
        logits_of(make(kind, n_group=8, topk_group=4), TOKENS)
    fields = lambda kind: ConfigFields(fields_of(kind, n_group=8, topk_group=4), "config.json")
    with pytest.raises(UsageError, match=r"tiny has 8 groups for 8 experts .* use at most 4 groups"):
        hf.parse_config(fields(kind), dtype="float32", name="tiny")
    by_maximum = fields_of("deepseek_v2", topk_method="group_limited_greedy", n_group=8, topk_group=4)
    config, *_ = hf.parse_config(ConfigFields(by_maximum, "config.json"), dtype="float32")
    assert config.experts.routing.num_groups == 8
    routing = config.experts.routing._replace(group_score="two_best")
    with pytest.raises(UsageError, match="sum of its two best experts"):
        dataclasses.replace(config, experts=config.experts._replace(routing=routing))


def test_same_bits_is_refused():
    fields = ConfigFields({"model_type": "mixtral"}, "config.json")
    with pytest.raises(UsageError, match="sums over experts"):
        hf.parse_config(fields, dtype="bfloat16", same_bits=True)
