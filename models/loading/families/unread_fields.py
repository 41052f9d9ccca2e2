"""Report of fields of configuration files that are not read, because a field that is ignored can change the results."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specjax.errors import CheckpointWarning
from specjax.files.untrusted import QUOTED, shorten
from specjax.models.loading.families.config_fields import ConfigFields

MAX_NAMES = 32  # fields that a report lists

GROUPS = {
    "origin of the file": """
        _commit_hash _from_model_config _name_or_path architectures auto_map base_model_name_or_path dtype
        is_composition is_llama_config model_type name_or_path precision tokenizer_class torch_dtype
        transformers.js_config transformers_version unsloth_fixed unsloth_version""",
    "initialisation, regularisation and training": """
        attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout conplemenrary_mask debug
        embd_pdrop embedding_dropout ep_size fuse_cross_entropy fuse_linear_cross_entropy gradient_checkpointing
        hidden_dropout hidden_dropout_prob ignore_index init_cutoff_factor init_device init_fn init_std
        initializer_cutoff_factor initializer_range micro_forward resid_pdrop residual_dropout router_aux_loss_coef
        router_jitter_noise skip_checkpoint use_deepep""",
    "implementation, with the same results up to rounding": """
        _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation
        cache_implementation chunk_size_feed_forward flash_attention pretraining_tp torchscript use_bfloat16 use_cache
        use_flash_attn""",
    "results beside the logits": """
        finetuning_task id2label label2id num_labels output_attentions output_hidden_states output_router_logits
        output_scores prefix problem_type return_dict return_dict_in_generate task_specific_params tf_legacy_loss""",
    "modules for multi-token prediction, which their tensors show": """
        mtp_num_hidden_layers mtp_use_dedicated_embeddings num_mtp_layers num_nextn_predict_layers""",
    "sampling and search, which the caller chooses": """
        diversity_penalty do_sample early_stopping length_penalty max_length max_new_tokens min_length num_beam_groups
        num_beams num_return_sequences temperature top_k top_p typical_p""",
    "token ids, which the reader of the tokenizer reads if they end a text": """
        bos_token_id cls_token_id eos_token_id pad_token_id sep_token_id unk_token_id""",
    "inputs other than text": """
        boi_token_id boi_token_index eoi_token_id eoi_token_index image_token_id image_token_index mm_tokens_per_image
        multimodal_projector_bias projector_hidden_act spatial_merge_size video_token_id vision_config
        vision_end_token_id vision_feature_layer vision_feature_select_strategy vision_start_token_id
        vocabulary_map vq_config""",
    "facts that the tensors show, or about training, also in GGUF files and nested objects": """
        attention.value_length finetuned rope.scaling.finetuned tensor_data_layout vocab_size""",
}
HARMLESS = frozenset(name for names in GROUPS.values() for name in names.split())
"""Names of fields that change no logits, whatever their value."""

ANY = object()

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "add_cross_attention": False, "attention_bias": False, "encoder_no_repeat_ngram_size": 0,
        "expert_count": 0, "expert_used_count": 0, "full_attn_mod": 1, "hidden_act": "gelu_pytorch_tanh",
        "interpolate_factor": 1, "is_decoder": False, "is_encoder_decoder": False, "lm_head_bias": False,
        "mlp_bias": False, "no_repeat_ngram_size": 0, "num_nextn_predict_layers": 0, "partial_rotary_factor": 1.0,
        "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0, "rope_interleaved": False,
        "tie_encoder_decoder": False, "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
    }
)  # fmt: skip
"""Fields that change nothing with this value, in families that do not read them."""


def warn_of_unread(
    fields: ConfigFields, stacklevel: int = 3, neutral: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Give a CheckpointWarning with the sentence of `describe_unread`, if there is one."""
    for note in describe_unread(fields, neutral):
        warnings.warn(note, CheckpointWarning, stacklevel=stacklevel)


def describe_unread(fields: ConfigFields, neutral: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ...]:
    """Return a sentence with the fields of a file that were not read; () if there are none.

    Args:
      fields: the fields of the whole file.
      neutral: more fields like NEUTRAL, for this kind of file; ANY stands for all values.
    """
    neutral = {**NEUTRAL, **neutral}
    is_harmless = lambda name, value: name in HARMLESS or (name in neutral and neutral[name] in (ANY, value))
    names = [
        full_name
        for full_name, name, value in fields.unread()
        if not is_harmless(name, value) and not is_harmless(full_name, value)
    ]
    if not names:
        return ()
    listed = ", ".join(shorten(repr(name)[1:-1], QUOTED) for name in names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    noun = "a field that is" if len(names) == 1 else f"{len(names)} fields that are"
    differ = "so the results differ from those of a library that reads them"
    return (f"{fields.where} has {noun} not read, {differ}: {listed}{more}",)
