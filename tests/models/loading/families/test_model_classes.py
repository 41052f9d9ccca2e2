"""A class that is not the family's own is looked up or refused by name."""

import json

import pytest

import specjax
from specjax.errors import UsageError
from specjax.models.loading import is_diffusion
from specjax.models.loading.families import denoisers, llama
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.gemma import gemma3, gemma4
from specjax.models.loading.families.hybrid import lfm2, qwen3_5, qwen3_next
from specjax.models.loading.families.latent import deepseek
from specjax.models.loading.families.model_classes import PREFIXES, check_class, check_own_code
from specjax.models.loading.families.registry import OF_CODES, VISION


def fields(**values) -> ConfigFields:
    return ConfigFields(values, "config.json")


def test_the_classes_of_transformers_are_the_families_own():
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    families = llama, gemma3, qwen3_5, qwen3_next, lfm2, gemma4, deepseek, *VISION, *OF_CODES
    types = {kind for family in families for kind in family.HF_TYPES}
    assert set(PREFIXES) == types - {"llada2_moe"}  # its class comes with its files
    for kind in PREFIXES.keys() - {"mimo"}:  # its class comes with its files
        assert hasattr(transformers, f"{PREFIXES[kind]}Model")
        names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
        for name in (names,) if isinstance(names, str) else names:
            check_class(fields(model_type=kind, architectures=[name]))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["LLaMAForCausalLM"]),  # before transformers 4.28
        ("qwen2", ["FSDPQwen2ForCausalLM"]),
        ("gemma3", ["Gemma3ForConditionalGeneration"]),
        ("mistral3", ["Mistral3ForConditionalGeneration"]),
        ("qwen3", ["Qwen3Model"]),
        ("llama", []),
    ],
)
def test_other_spellings_are_own_too(kind, names):
    check_class(fields(model_type=kind, architectures=names))


PHI3 = "microsoft/Phi-3-mini-4k-instruct--modeling_phi3.Phi3ForCausalLM"


@pytest.mark.parametrize("path", [PHI3, "modeling_phi3.Phi3ForCausalLM"])
def test_phi3_was_published_with_its_code(path):
    config = fields(model_type="phi3", auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": path})
    check_class(config)
    check_own_code(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}, '"Qwen2ForCausalLM" in architectures, which '),
        ({"model_type": "llama", "architectures": ["MyLlamaForCausalLM"]}, "which is not one of llama"),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "a classifier or reward model; use a lan"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "a classifier or reward model"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "a draft head, which specjax.load_head"),
        (
            {"model_type": "qwen2", "auto_map": {"AutoModelForCausalLM": "modeling_gte.GteForCausalLM"}},
            r'"GteForCausalLM" in auto_map.AutoModelForCausalLM',
        ),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
             "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}},
            'names code of its own in auto_map.AutoModel, "modeling_qwen", which specjax never runs; if',
        ),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "text_mask_token_id": 7, "block_size": 4,
             "auto_map": {"AutoModelForCausalLM": "modeling_qwen2.Qwen2ForCausalLM"}},
            "has text_mask_token_id, so it is SDLM, a diffusion model, that specjax does not support",
        ),
        ({"model_type": "llama", "mask_token_id": 7}, "has mask_token_id, so it is a diffusion model of a kind"),
        ({"model_type": "nemotron_labs_diffusion"}, "is Nemotron-Labs-Diffusion, a diffusion model, which"),
        ({"model_type": "ministral", "architectures": ["NemotronLabsDiffusionModel"]}, "is Nemotron-Labs-Diffusion, a"),
        ({"model_type": "wedlm"}, "is WeDLM, a diffusion model"),
        ({"model_type": "qwen3", "architectures": ["WeDLMForCausalLM"]}, "is WeDLM, a diffusion model"),
        ({"model_type": "diffusion_gemma"}, "is DiffusionGemma, a diffusion model"),
        ({"model_type": "gemma3", "architectures": ["DiffusionGemmaForBlockDiffusion"]}, "is DiffusionGemma, a diffu"),
        ({"model_type": "qwen3", "architectures": ["Qwen3DLLMForCausalLM"]}, 'is "Qwen3DLLMForCausalLM", a diffusion'),
        ({"model_type": "lfm2", "architectures": ["Lfm2ForBlockDiffusion"]}, "is LFM2 with block diffusion, a diffu"),
        ({"model_type": "mmada"}, "is MMaDA, a diffusion model"),
        ({"model_type": "llava_llada"}, "is LLaDA-V, a diffusion model"),
    ],
)  # fmt: skip
def test_other_classes_and_code_are_refused_by_name(config, words, tiny, tmp_path):
    """They are refused as targets and as denoisers, from the small files of a folder."""
    base = config["model_type"] if config["model_type"] in ("llama", "qwen2", "qwen3") else "llama"
    tiny.save(tiny.model(base), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "architectures": [], **config}))
    for load in (specjax.load, specjax.load_denoiser):
        with pytest.raises(UsageError, match=words):
            load(tmp_path)
    assert not is_diffusion(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llada", "LLaDAForMultiModalGeneration"), ("llada", "LLaDOUModelLM"),
        ("sdar", "SDARForSequenceClassification"), ("Dream", "DreamOnModel"),
        ("Fast_dLLM_Qwen", "Fast_dLLM_QwenForReward"),
        ("a2d-qwen3", "A2DQwen3MoeLMHeadModel"),
    ],
)  # fmt: skip
def test_other_classes_with_the_type_of_a_diffusion_model(kind, name):
    """Other classes are refused: their code differs from that of the type, as autoregressive models' code can."""
    for value in ({"architectures": [name]}, {"auto_map": {"AutoModel": f"modeling_x.{name}"}}):
        with pytest.raises(UsageError, match=f'"{name}" in .*(which is not one of {kind}|a classifier or reward)'):
            denoisers.to_base_family(fields(model_type=kind, **value))
    with pytest.raises(UsageError, match='"MyForCausalLM" in architectures, which is not one of qwen2'):
        denoisers.to_base_family(fields(model_type="qwen2", mask_token_id=7, architectures=["MyForCausalLM"]))


def test_classes_of_diffusion_models():
    for kind, names in {
        "llada": ["LLaDAModelLM", "LLaDAModel"], "Dream": ["DreamModel", "DreamBaseModel"],
        "sdar": ["SDARModel", "Qwen3ForCausalLM"], "a2d-qwen3": ["A2DQwen3LMHeadModel"],
        "Fast_dLLM_Qwen": ["Fast_dLLM_QwenForCausalLM"],
    }.items():  # fmt: skip
        base = denoisers.to_base_family(fields(model_type=kind, architectures=names)).text("model_type")
        assert base == denoisers.KINDS[kind].base


def test_supported_diffusion_models_are_looked_up():
    names = {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"}
    assert denoisers.find_kind(fields(model_type="llama", auto_map=names)).released_mask == 5
    for kind, name in (("llada", "LLaDAModelLM"), ("Dream", "DreamModel"), ("sdar", "SDARForCausalLM"),
                       ("Fast_dLLM_Qwen", "Fast_dLLM_QwenForCausalLM")):  # fmt: skip
        assert denoisers.find_kind(fields(model_type=kind, architectures=[name])) is denoisers.KINDS[kind]
