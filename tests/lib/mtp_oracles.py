"""Modules for multi-token prediction in torch, made of each family's own decoder layer, and their files."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import NamedTuple

import dialects as d
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Target
from specjax.models.heads.contract import DraftedNodes, DraftHead, FeaturePairs
from specjax.types import Context

TEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])  # 12 pairs
DRAFT = np.array([7, 30, 2])
D, V = d.D, d.V


class Family(NamedTuple):
    """A family's classes in transformers, and the form of its modules."""

    dialect: str
    module: str  # of transformers.models
    prefix: str  # of its classes
    layer: dict[str, object]  # fields of its config
    names: dict[str, str]  # of a module's parts; {} is the number of the module
    hidden_first: bool = False
    centred: bool = False  # norms store w and multiply by 1 + w
    chained: str = "normed"
    hidden: str = "normed"  # the hidden state of the target that it reads
    config_prefix: str = ""  # of its config and its rotation, if that is another
    layer_index: int = 0
    separate: bool = True  # files have a tensor for each matrix of an expert, and not two for all experts


LIKE_DEEPSEEK = {
    "enorm": "model.layers.{}.enorm", "hnorm": "model.layers.{}.hnorm", "eh_proj": "model.layers.{}.eh_proj",
    "norm": "model.layers.{}.shared_head.norm", "layer": "model.layers.{}",
}  # fmt: skip
QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc", "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}  # fmt: skip
FAMILIES = {
    "mimo": Family(
        "mimo", "qwen2", "Qwen2", {}, {
            "enorm": "model.mtp_layers.{}.token_layernorm", "hnorm": "model.mtp_layers.{}.hidden_layernorm",
            "eh_proj": "model.mtp_layers.{}.input_proj", "norm": "model.mtp_layers.{}.final_layernorm",
            "layer": "model.mtp_layers.{}",
        }, hidden_first=True, chained="raw", hidden="raw",
    ),
    "gguf": Family("gguf", "qwen2", "Qwen2", {}, LIKE_DEEPSEEK),
    "glm": Family(
        "deepseek", "glm4_moe", "Glm4Moe",
        {"first_k_dense_replace": 9, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
        LIKE_DEEPSEEK,
    ),
    "qwen3_5": Family(
        "qwen3_5", "qwen3_5", "Qwen3_5", {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        }, QWEN_NAMES, centred=True, config_prefix="Qwen3_5Text", layer_index=1,
    ),
    "qwen3_next": Family(
        "qwen3_5", "qwen3_next", "Qwen3Next",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "partial_rotary_factor": 0.25},
        QWEN_NAMES, centred=True, layer_index=1,
    ),
    "qwen3_next_moe": Family(
        "qwen3_5", "qwen3_next", "Qwen3Next", {
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.25, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
        }, QWEN_NAMES, centred=True, layer_index=1,
    ),
    "qwen3_5_moe": Family(
        "qwen3_5", "qwen3_5_moe", "Qwen3_5Moe", {
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.25,
        }, QWEN_NAMES, centred=True, config_prefix="Qwen3_5MoeText", layer_index=1, separate=False,
    ),
    "glm_moe": Family(
        "deepseek", "glm4_moe", "Glm4Moe", {
            "first_k_dense_replace": 0, "use_qk_norm": False, "attention_bias": True, "partial_rotary_factor": 0.5,
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
        }, LIKE_DEEPSEEK,
    ),
    "deepseek_v3": Family(
        "deepseek", "deepseek_v3", "DeepseekV3", {
            "first_k_dense_replace": 0, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 2.5, "head_dim": 4,
        }, LIKE_DEEPSEEK,
    ),
    "ernie": Family(
        "ernie", "ernie4_5", "Ernie4_5", {"use_bias": False}, {
            "enorm": "model.mtp_emb_norm.{}", "hnorm": "model.mtp_hidden_norm.{}",
            "eh_proj": "model.mtp_linear_proj.{}", "layer": "model.mtp_block.{}",
        }, chained="raw", hidden="raw",
    ),
}  # fmt: skip


def config_of(family: Family):
    """Return a tiny config of the family as an object of transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family.module}")
    sizes = dict(
        vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5, hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    layer = dict(family.layer)
    if part := layer.pop("partial_rotary_factor", None):
        sizes["rope_parameters"]["partial_rotary_factor"] = part
    config = getattr(module, f"{family.config_prefix or family.prefix}Config")(**(sizes | layer))
    config._attn_implementation = "eager"
    return config


class Oracle:
    """Modules of a family in float64 torch with random weights."""

    def __init__(self, family: Family, modules: int = 1):
        import torch

        self.family, self.config = family, config_of(family)
        code = importlib.import_module(f"transformers.models.{family.module}.modeling_{family.module}")
        of = lambda name: getattr(code, family.prefix + name)
        torch.manual_seed(0)
        norm = lambda: of("RMSNorm")(D, eps=1e-5)
        self.parts = [
            {
                "enorm": norm(), "hnorm": norm(), "eh_proj": torch.nn.Linear(2 * D, D, bias=False),
                "layer": of("DecoderLayer")(self.config, family.layer_index), "norm": norm(),
            }
            for _ in range(modules)
        ]  # fmt: skip
        rotary = family.config_prefix or family.prefix
        self.rotary = getattr(code, f"{rotary}RotaryEmbedding")(self.config).double()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for part in self.parts:
                for module in part.values():
                    module.double().eval()
                    for name, p in (*module.named_parameters(), *module.named_buffers()):
                        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                        is_norm = p.ndim == 1 and "bias" not in name
                        centre = 0.0 if family.centred or not is_norm else 1.0
                        p.copy_(centre + 0.3 * noise if p.ndim == 1 else noise * 1.5 * p.shape[-1] ** -0.5)

    def tensors(self, first: int = 0) -> dict[str, np.ndarray]:
        """Return the tensors by the names of the family's files. first: number of the first module."""
        tensors = {
            f"{self.family.names[name].format(first + j)}.{key}": p.detach().numpy().astype(np.float32)
            for j, part in enumerate(self.parts)
            for name, module in part.items()
            if name in self.family.names
            for key, p in (*module.named_parameters(), *module.named_buffers())
        }
        return per_expert(tensors) if self.family.separate else tensors

    def share_norm(self, weight) -> None:
        """Give the modules the final norm of the target if they have none of their own."""
        if "norm" not in self.family.names:
            for part in self.parts:
                part["norm"].weight.data[:] = part["norm"].weight.new_tensor(np.asarray(weight, np.float64))

    def run(self, j: int, embedded, state):
        """Return the outputs [T, D] of the layer of module j, and those after its norm, in torch."""
        import torch

        part = self.parts[j]
        joined = [part["enorm"](embedded), part["hnorm"](state)]
        x = part["eh_proj"](torch.cat(joined[::-1] if self.family.hidden_first else joined, -1))[None]
        size = x.shape[1]
        mask = torch.full((size, size), -1e30, dtype=torch.float64).triu(1)[None, None]
        rotation = self.rotary(x, torch.arange(size)[None])
        y = part["layer"](x, position_embeddings=rotation, attention_mask=mask, position_ids=torch.arange(size)[None])
        y = (y[0] if isinstance(y, tuple) else y)[0]
        return y, part["norm"](y)

    def logits(self, features, embedding, head, text=TEXT, draft=DRAFT) -> np.ndarray:
        """Return the logits [n + len(draft), V] after each pair of a text, and after each drafted token.

        features: [n, D], hidden states. Every drafted token repeats the whole pass, without a cache.
        """
        import torch

        embedding, head = (torch.tensor(np.asarray(x, np.float64)) for x in (embedding, head))
        state, tokens = torch.tensor(np.asarray(features, np.float64)), list(text[1:])
        with torch.no_grad():
            output, normed = self.run(0, embedding[tokens], state)
            rows = [normed @ head.T]
            for depth, token in enumerate(draft, 1):
                tokens.append(token)
                if len(self.parts) == 1:  # the same module, one position further on
                    back = normed if self.family.chained == "normed" else output
                    state = torch.cat([state, back[-1:]])
                    output, normed = self.run(0, embedding[tokens], state)
                elif depth < len(self.parts):  # the next module, at the same states
                    state = {"normed": normed, "raw": output, "target": state}[self.family.chained]
                    output, normed = self.run(depth, embedding[tokens[depth:]], state)
                rows.append(normed[-1:] @ head.T)
        return torch.cat(rows).numpy()


def per_expert(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors with those of all experts, as transformers has them in memory, split as in files."""
    result = {}
    for name, x in tensors.items():
        prefix, _, part = name.partition(".mlp.experts.")
        matrices = {"gate_up_proj": {"gate": x[:, : x.shape[1] // 2], "up": x[:, x.shape[1] // 2 :]} if part else {}}
        matrices |= {"down_proj": {"down": x}, "": {}}
        for matrix, of_experts in matrices[part].items():
            result |= {f"{prefix}.mlp.experts.{e}.{matrix}_proj.weight": y for e, y in enumerate(of_experts)}
        result |= {} if part else {name: x}
    return result


def config_json(family: Family, modules: int = 1, **changes) -> dict:
    """Return the fields of config.json."""
    fields = config_of(family).to_dict() | {"num_nextn_predict_layers": modules}
    return {name: value for name, value in fields.items() if name != "dtype"} | changes


def write_module(folder: Path, family: Family, oracle: Oracle, **changes) -> Path:
    """Write a folder that has modules only."""
    return d.write(folder, config_json(family, len(oracle.parts), **changes), oracle.tensors(first=2))


@jax.jit
def run_head(head: DraftHead, target: Target, text, draft):
    """Return the logits of `Oracle.logits` from a head, and the hidden states of its target."""
    model, (size, depth) = target.model, (len(text) - 1, len(draft))
    taps = {"taps": head.head.taps} if head.head.taps else {}
    cache = model.init_cache(target.params, None, 1, size)
    mask, positions = jnp.tril(jnp.ones((1, size, size), bool)), jnp.arange(size)[None]
    output, _ = model.forward(target.params, text[None, :-1], cache, positions=positions, mask=mask, **taps)
    features = head.head.features_of(output)
    context = Context(text[None], jnp.asarray([size + 1]), target=target)
    read = lambda count: head.head.read(
        head.params, head.head.init_memory(head.params, context, 1, size),
        FeaturePairs(features, text[None, 1:], count), context,
    )  # fmt: skip
    _, rows = head.head.start(head.params, read(1 + jnp.arange(size)[None]), context, 1)
    scratch, _ = head.head.start(head.params, read(jnp.asarray([size])), context, 1 + depth)
    drafted = []
    for k in range(1, depth + 1):
        one = lambda x: jnp.full((1, 1), x, jnp.int32)
        visible = ((jnp.arange(1 + depth) < k) & (jnp.arange(1 + depth) > 0))[None, None]
        node = DraftedNodes(draft[None, k - 1 : k], one(k), jnp.int32(k), one(k - 1), visible)
        scratch, logits = head.head.follow(head.params, scratch, node, context)
        drafted.append(logits[0])
    return jnp.concatenate([rows, *drafted]), features[0]


CHECKPOINTS = {
    "mimo": ("Qwen2ForCausalLM", {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}),
}  # fmt: skip


def write_checkpoint(folder: Path, name: str = "mimo"):
    """Write a tiny target with its module and a tokenizer of words; return the folder, the model, and the oracle."""
    import torch
    import transformers
    from safetensors.torch import save_file

    tokenizers = pytest.importorskip("tokenizers")
    family, (architecture, changes) = FAMILIES[name], CHECKPOINTS[name]
    oracle = Oracle(family)
    model = getattr(transformers, architecture)(oracle.config).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1.0 - family.centred + 0.3 * noise if p.ndim == 1 else noise * 2 * p.shape[-1] ** -0.5)
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors |= {name: torch.tensor(x) for name, x in oracle.tensors().items()}
    save_file(tensors, folder / "model.safetensors")
    fields = config_json(family, **changes)
    (folder / "config.json").write_text(json.dumps(fields))
    words = {"<unk>": 0, "</s>": 2} | {f"w{i}": i for i in range(3, V)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model, oracle
