"""GGUF files of gpt-oss, GLM-4.5 and DeepSeek: parity with transformers, forms of converters, and what is refused."""

import dataclasses

import gguf_files
import jax
import mixture_gguf
import numpy as np
import pytest
from expert_models import logits_of, make
from hybrid_logits import whole_text_logits
from tiers import exhaustive

from specjax import models
from specjax.errors import CheckpointWarning, UsageError
from specjax.models.loading.families import mixtures
from specjax.models.loading.families.latent import deepseek_gguf
from specjax.models.loading.formats import gguf
from specjax.models.loading.tensors.assembly import assemble, check_tensors
from specjax.models.loading.tensors.file_formats import with_file_formats

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 24))
GATE, UP, _ = (f"layers.*.mlp.{part}.weight" for part in mixtures.PARTS)
KEYS, VALUES = (f"layers.*.attention.{part}_up.weight" for part in "kv")
_logits = jax.jit(whole_text_logits, static_argnums=0)


def read(model, file, **options):
    """Write a model, and return its checkpoint with checked tensors. Every field of the file is read."""
    checkpoint, _ = gguf.read(mixture_gguf.write(model, file, **options), dtype="float32", name="")
    check_tensors(checkpoint)
    return checkpoint


def error(checkpoint, expected):
    """Return the largest difference of logits, divided by the tolerance of parity."""
    logits = _logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS)
    return np.abs(np.asarray(logits) - expected).max() / (1e-5 * max(1.0, np.abs(expected).max()))


def _exchanged(c, first, second):
    return c._replace(stored=c.stored | {first: c.stored[second], second: c.stored[first]})


KINDS = "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3"


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """Return a model of transformers, its GGUF checkpoint and its logits."""
    model = make(request.param)
    checkpoint = read(model, tmp_path_factory.mktemp("gguf") / "model.gguf")
    return model, checkpoint, logits_of(model, TOKENS)


@pytest.mark.filterwarnings("error::specjax.errors.CheckpointWarning")
def test_parity(case):
    _, checkpoint, expected = case
    assert error(checkpoint, expected) < 1
    assert error(_exchanged(checkpoint, GATE, UP), expected) > 20


def _with(checkpoint, **changes):
    return checkpoint._replace(config=dataclasses.replace(checkpoint.config, **changes))


def _with_routing(checkpoint, **changes):
    experts = checkpoint.config.experts
    return _with(checkpoint, experts=experts._replace(routing=experts.routing._replace(**changes)))


def test_each_field_of_a_router_counts(case):
    """The logits change if the scores, the groups or the scale of a file are left out."""
    model, checkpoint, expected = case
    kind = model.config.model_type
    changes = {
        "gpt_oss": {"scores": "softmax"},
        "glm4_moe": {"scores": "softmax"},
        "deepseek_v2": {"normalized": True},
        "deepseek_v3": {"num_groups": 1, "num_chosen_groups": 1},
    }[kind]
    assert error(_with_routing(checkpoint, **changes), expected) > 20


def test_experts_in_blocks_stay_quantised(tmp_path):
    """MXFP4 of gpt-oss is exact in int8, and its gates are a tensor of their own."""
    model = make("gpt_oss")
    checkpoint = read(model, tmp_path / "blocks.gguf", kind="MXFP4")
    quantized = checkpoint._replace(config=with_file_formats(checkpoint, "cpu"))
    params = assemble(quantized)
    experts = params["layers"][0]["mlp"]["expert_up"]["weight"]
    assert experts.values.dtype == np.int8 and experts.scales.shape == (8, 64, 2)
    expected = np.asarray(_logits(models.make_model(checkpoint.config), assemble(checkpoint), TOKENS))
    assert error(quantized, expected) < 1
    assert error(quantized, logits_of(model, TOKENS)) > 20


LATENT = {"kv_lora_rank": 32, "hidden_size": 64, "q_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32}


@pytest.mark.parametrize("kind", ["deepseek_v3", exhaustive("deepseek_v2")])
def test_keys_and_values_of_short_vectors(kind, tmp_path):
    """Present converters split them by head and transpose the keys, also in blocks. Earlier ones keep one matrix."""
    model = make(kind, **LATENT)
    expected = logits_of(model, TOKENS)
    joined = read(model, tmp_path / "whole.gguf", joined=True)
    assert error(joined, expected) < 1
    file = mixture_gguf.write(model, tmp_path / "split.gguf")
    split, _ = gguf.read(file, dtype="float32", name="")
    assert split.config == joined.config
    assert error(split, expected) < 1
    keys = split.stored[KEYS]._replace(transposed=False)
    assert error(split._replace(stored=split.stored | {KEYS: keys}), expected) > 20
    assert error(_exchanged(joined, KEYS, VALUES), expected) > 20
    blocks = read(model, tmp_path / "blocks.gguf", kind="Q8_0")
    quantized = blocks._replace(config=with_file_formats(blocks, "cpu"))
    logits = np.asarray(_logits(models.make_model(blocks.config), assemble(blocks), TOKENS))
    assert error(quantized, logits) < 1
    assert 20 < np.abs(logits - expected).max() / 1e-5 < 2e4


def test_the_router_is_that_of_v3_if_the_file_has_corrections(tmp_path):
    """Files of GLM-4.7-Flash and earlier ones of DeepSeek-V2 do not name the scores."""
    for kind in ("deepseek_v2", "deepseek_v3"):
        model = make(kind)
        named = read(model, tmp_path / "named.gguf")
        assert read(model, tmp_path / "unnamed.gguf", without=["expert_gating_func"]).config == named.config
        assert named.config.model_type == kind


def test_groups_by_their_maximum(tmp_path):
    model = make("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2)
    checkpoint, expected = read(model, tmp_path / "groups.gguf"), logits_of(model, TOKENS)
    assert error(checkpoint, expected) < 1
    assert error(_with_routing(checkpoint, group_score="two_best"), expected) > 20


OLD_FIELDS = ["expert_group_count", "expert_group_used_count"]


def test_groups_of_published_models_that_files_lack(tmp_path, monkeypatch):
    """The sizes of DeepSeek-V2 and V3 name their groups. Those of the small model stand in for them."""
    of_v2, of_v3 = deepseek_gguf.PUBLISHED_GROUPS.values()
    assert (of_v2, of_v3) == ((8, 3), (8, 4))
    for kind, changes in (("deepseek_v2", {"topk_method": "group_limited_greedy"}), ("deepseek_v3", {})):
        model = make(kind, n_group=4, topk_group=1, **changes)
        file = mixture_gguf.write(model, tmp_path / f"{kind}.gguf", without=OLD_FIELDS)
        expected = logits_of(model, TOKENS)
        plain, _ = gguf.read(file, dtype="float32", name="")
        assert plain.config.experts.routing.num_groups == 1 and error(plain, expected) > 20
        c = model.config
        sizes = deepseek_gguf.PublishedSizes(
            c.n_routed_experts, c.num_experts_per_tok, c.n_shared_experts, c.moe_intermediate_size,
            c.first_k_dense_replace, c.num_hidden_layers, c.hidden_size,
        )  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(deepseek_gguf, "NUM_IN_GROUPS", (c.n_routed_experts,))
            patch.setattr(deepseek_gguf, "PUBLISHED_GROUPS", {sizes: (4, 1)})
            checkpoint, _ = gguf.read(file, dtype="float32", name="")
        assert error(checkpoint, expected) < 1


@pytest.mark.parametrize("place", [0, 1])
def test_sizes_of_published_models_without_groups(place, tmp_path):
    """A file with all sizes of DeepSeek-V2 or V3 has their groups, and one with another width is refused."""
    sizes, (groups, best) = list(deepseek_gguf.PUBLISHED_GROUPS.items())[place]
    model = make(("deepseek_v2", "deepseek_v3")[place])
    read_with = lambda changes: gguf.read(
        mixture_gguf.write(model, tmp_path / "model.gguf", without=OLD_FIELDS, changes=changes),
        dtype="float32",
        name="",
    )[0]
    routing = read_with(sizes._asdict()).config.experts.routing
    assert (routing.num_groups, routing.num_chosen_groups) == (groups, best)
    with pytest.raises(UsageError, match=r"lacks deepseek2.expert_group_count"):
        read_with(sizes._asdict() | {"embedding_length": sizes.embedding_length + 64})


def test_a_negative_factor_of_yarn_is_not_set(tmp_path):
    model = make("gpt_oss")
    unset = {f"rope.scaling.yarn_{name}_factor": -1.0 for name in ("ext", "attn")}
    file = mixture_gguf.write(model, tmp_path / "unset.gguf", changes=unset)
    checkpoint, _ = gguf.read(file, dtype="float32", name="")
    assert error(checkpoint, logits_of(model, TOKENS)) < 1


def test_a_module_is_no_layer_of_the_model(tmp_path):
    """GLM-4.5 counts its module among the blocks."""
    model = make("glm4_moe", num_hidden_layers=3)
    checkpoint = read(model, tmp_path / "module.gguf", module=True)
    assert checkpoint.config.num_layers == 2 and checkpoint.native.count == 1
    assert "experts" in checkpoint.native.lacking


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_yarn(kind, tmp_path):
    """Files of dense models state YaRN too, which lengthens texts."""
    import transformers

    config = transformers.AutoConfig.for_model(
        kind, vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
            "beta_fast": 16.0, "beta_slow": 2.0,
        },
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    checkpoint, _ = gguf.read(gguf_files.write(model, tmp_path / "yarn.gguf"), dtype="float32", name="")
    expected = logits_of(model, TOKENS)
    assert error(checkpoint, expected) < 1 and checkpoint.config.max_positions == 128
    assert error(_with(checkpoint, rope_scaling=None), expected) > 20


REFUSED = {
    "lacks deepseek2.rope.scaling.yarn_log_multiplier": ("deepseek_v2", ["rope.scaling.yarn_log_multiplier"], {}),
    "lacks deepseek2.expert_group_count": ("deepseek_v2", ["expert_group_count"], {"expert_count": 160}),
    "expert_weights_norm and softmax": ("deepseek_v2", [], {"expert_weights_norm": True}),
    "has no experts": ("deepseek_v2", ["expert_count"], {}),
    "none of its 2 layers has": ("glm4_moe", [], {"leading_dense_block_count": 2}),
    "groups must divide": ("glm4_moe", [], {"expert_group_count": 3}),
    "8 groups for 8 experts": ("deepseek_v3", [], {"expert_group_count": 8}),
    "expert_gating_func 1, a router": ("glm4_moe", [], {"expert_gating_func": 1}),
    "expert_gating_func 7, a router": ("deepseek_v3", [], {"expert_gating_func": 7}),
    "must be at most 8": ("gpt_oss", [], {"expert_used_count": 9}),
    "1 and 1 only": ("gpt_oss", [], {"expert_weights_scale": 2.5}),
    "must be even and below 12": ("deepseek_v3", [], {"rope.dimension_count": 12}),
    "yarn_attn_factor 2": ("gpt_oss", [], {"rope.scaling.yarn_attn_factor": 2.0}),
    "yarn_ext_factor 0,": ("gpt_oss", [], {"rope.scaling.yarn_ext_factor": 0.0}),
    "scaling.attn_factor 1.2": ("deepseek_v3", [], {"rope.scaling.attn_factor": 1.2}),
    "attention.temperature_scale": ("deepseek_v3", [], {"attention.temperature_scale": 0.1}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_are_refused(message, tmp_path):
    kind, without, changes = REFUSED[message]
    file = mixture_gguf.write(make(kind), tmp_path / "model.gguf", without=without, changes=changes)
    with pytest.raises(UsageError, match=message):
        gguf.read(file, dtype="float32", name="")


def test_fields_that_are_not_read_are_named(tmp_path):
    file = mixture_gguf.write(make("gpt_oss"), tmp_path / "model.gguf", changes={"swiglu_clamp_exp": 5})
    with pytest.warns(CheckpointWarning, match="swiglu_clamp_exp"):
        gguf.read(file, dtype="float32", name="")
