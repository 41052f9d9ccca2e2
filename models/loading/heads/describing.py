"""The parts of config.json that several kinds of heads share."""

from __future__ import annotations

from typing import Any

from specjax.models.llama import LlamaConfig
from specjax.models.loading.families.llama import config_to_hf
from specjax.version import __version__


def described_layers(c: LlamaConfig) -> dict[str, Any]:
    """Of decoder layers, as Hugging Face's configs have them."""
    layers = config_to_hf(c) | {"attention_bias": c.qkv_bias, "tie_word_embeddings": False}
    return {name: value for name, value in layers.items() if name not in ("architectures", "use_sliding_window")}


def described_verifier(algorithm: str, architecture: str, about: dict[str, Any]) -> dict[str, Any]:
    """What all configs of vllm speculators begin with. `about`: `num_tokens` to draft, and the target's `name`
    and `architectures`."""
    proposal = {
        "proposal_type": "greedy", "speculative_tokens": about["num_tokens"], "verifier_accept_k": 1,
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
            "verifier": {"name_or_path": about["name"], "architectures": about["architectures"]},
        },
    }
