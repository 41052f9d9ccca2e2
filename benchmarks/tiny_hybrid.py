"""A tiny model in the form of Qwen3.5 with its own module for multi-token prediction, trained on generated stories.

    python benchmarks/tiny_hybrid.py --out tests/data/hybrid --run build/tiny_hybrid

The model has three gated delta nets and one attention layer with an output gate, like a group of Qwen3.5's layers. Its
tokens are the bytes of `toy_tasks.stories`. The model is trained first, and then its module, which reads its hidden
states. Both trainings are those of `specjax.training`. An interrupted run continues from its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from safetensors.numpy import load_file
from toy_tasks.stories import story

import specjax
from specjax.files.atomic import write_tensors
from specjax.models import init_params, make_model
from specjax.models.decoder import DecoderConfig
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.mtp import of_target
from specjax.models.hybrid.config import GatedDeltaSizes, HybridConfig, LayerKind
from specjax.models.loading.tokenizers.tokenizer import LibraryCodec, Tokenizer
from specjax.training import TrainingText, new_head, recipe_of, train
from specjax.training.loop.trainer import TrainingProgress

GROUP = (*[LayerKind("gated_delta")] * 3, LayerKind("attention"))
END = "<|endoftext|>"
SLOWER = 0.03  # factor on the random rates of decays, so that an untrained state lasts for a sentence
VOCABULARY = 384  # pieces: 256 bytes, their most frequent joins in stories, and END
LENGTH = 192  # tokens of a training row


def config() -> HybridConfig:
    """Return the shapes: 242,000 parameters with the module."""
    return HybridConfig(
        vocab_size=VOCABULARY, width=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32, mlp_width=128,
        kinds=GROUP, gated_delta=GatedDeltaSizes(2, 4, 16, 16), attention_gate=True, qk_norm=True, rotary_dim=8,
        norm_eps=1e-6, rope_base=10_000.0, max_positions=2048, tied=True, model_type="qwen3_5_text",
        name="tiny-hybrid",
    )  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer of VOCABULARY pieces: the bytes in GPT-2's alphabet, the stories' frequent parts, and END."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    backend.train_from_iterator([story(rng) for _ in range(500)], trainer)
    vocab = backend.get_vocab()
    return Tokenizer(
        LibraryCodec(backend), tuple(sorted(vocab, key=vocab.get)), (vocab[END],), None, {"eos_token": END}
    )


def texts(count: int, seed: int) -> list[TrainingText]:
    """Return stories with an end token. All but the first two tokens are trained."""
    rng, to_ids = np.random.default_rng(seed), tokenizer()
    return [TrainingText((*to_ids.encode(story(rng)), *to_ids.eos), 2) for _ in range(count)]


def untrained(seed: int) -> specjax.Target:
    """Return the model with random parameters."""
    params: Any = init_params(config(), jax.random.key(seed))
    for layer in params["layers"].values():
        if "recurrent" in layer:
            layer["recurrent"]["decay"]["rate"] *= SLOWER
    return specjax.Target(make_model(config()), params)


def rounded(target: specjax.Target) -> specjax.Target:
    """Return the model with the values that its file will have."""
    cast = lambda x: x.astype(jnp.bfloat16).astype(x.dtype)
    return specjax.Target(target.model, jax.tree.map(cast, target.params))


def write(
    folder: Path, shapes: DecoderConfig, target: specjax.Target, tensors: Callable[[Any], dict[str, Any]],
    module: DraftHead, count: str,
) -> None:  # fmt: skip
    """Write a model of `shapes` with its module and its tokenizer, in bfloat16, under the names of its family's files.

    Args:
      tensors: from the module's parameters to its tensors by name.
      count: the field of config.json with the number of modules.
    """
    narrow = lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    model = make_model(dataclasses.replace(shapes, dtype="bfloat16"))
    specjax.save_model(folder, specjax.Target(model, narrow(target.params)), tokenizer())
    stored = load_file(folder / "model.safetensors") | tensors(narrow(module.params))
    write_tensors(folder / "model.safetensors", stored)
    fields = json.loads((folder / "config.json").read_text()) | {count: 1}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def module_tensors(params: Any) -> dict[str, Any]:
    """Return the tensors of a module. Its norms are stored without the 1, its queries with their output gates."""
    layer = params["stack"][0]
    attention, norms, c = layer["attention"], {}, config()
    heads = lambda name: attention[name]["weight"].reshape(c.num_heads, c.head_dim, c.width)
    norms = {
        "pre_fc_norm_embedding": params["embedding_norm"], "pre_fc_norm_hidden": params["state_norm"],
        "norm": params["norm"], "layers.0.input_layernorm": layer["attention_norm"],
        "layers.0.post_attention_layernorm": layer["mlp_norm"], "layers.0.self_attn.q_norm": attention["q_norm"],
        "layers.0.self_attn.k_norm": attention["k_norm"],
    }  # fmt: skip
    matrices = {
        "fc": params["fc"]["weight"],
        "layers.0.self_attn.q_proj": jnp.concatenate([heads("q"), heads("output_gate")], 1).reshape(-1, c.width),
        **{f"layers.0.self_attn.{name}_proj": attention[name]["weight"] for name in "kvo"},
        **{f"layers.0.mlp.{name}_proj": layer["mlp"][name]["weight"] for name in ("gate", "up", "down")},
    }
    values = matrices | {name: norm["weight"] - 1 for name, norm in norms.items()}
    return {f"mtp.{name}.weight": np.asarray(value) for name, value in values.items()}


def on_progress(progress: TrainingProgress) -> None:
    if progress.step % 25 == 0 or progress.step == 1:
        accuracy = " ".join(f"{share:.3f}" for share in progress.accuracy)
        print(
            f"{progress.step}/{progress.steps} loss {progress.loss:.3f} right {accuracy} {progress.seconds:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of the model")
    parser.add_argument("--run", required=True, type=Path, help="folder of the state of the training")
    parser.add_argument("--stories", type=int, default=8000, help="for the model; its module has a third of them")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = {"rows": args.rows, "length": LENGTH, "seed": args.seed, "evaluate_every": 50, "on_progress": on_progress}
    lessons = texts(args.stories, args.seed + 1)
    recipe = recipe_of("fastdraft_pretraining", optimizer="muon", learning_rate=1e-2, tables=1.0)
    target = rounded(train(None, untrained(args.seed), lessons, recipe=recipe, folder=args.run / "model", **shape))
    module = new_head("mtp", of_target(config()), target, jax.random.key(args.seed))
    module = train(target, module, lessons[: args.stories // 3], folder=args.run / "module", **shape)
    write(args.out, config(), target, module_tensors, module, "mtp_num_hidden_layers")


if __name__ == "__main__":
    main()
