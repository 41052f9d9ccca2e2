"""Parts of config.json that several kinds of heads share."""

from __future__ import annotations

from typing import Any

from specjax.models.llama import LlamaConfig
from specjax.models.loading.families.llama import config_to_hf
from specjax.models.loading.heads.format import SaveInfo
from specjax.version import __version__


def describe_layers(c: LlamaConfig) -> dict[str, Any]:
    """Return the fields of decoder layers, as Hugging Face's configs name them."""
    layers = config_to_hf(c) | {"attention_bias": c.qkv_bias, "tie_word_embeddings": False}
    return {name: value for name, value in layers.items() if name not in ("architectures", "use_sliding_window")}


def describe_verifier(algorithm: str, architecture: str, info: SaveInfo) -> dict[str, Any]:
    """Return the fields that all configs of vllm speculators have."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": info.num_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": f"specjax {__version__}",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": info.target, "architectures": info.architectures},
        },
    }
