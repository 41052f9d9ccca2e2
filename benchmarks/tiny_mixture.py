"""A tiny mixture of experts in the form of GLM-4.5 with its own module, trained on generated stories.

    python benchmarks/tiny_mixture.py --out tests/data/mixture --run build/tiny_mixture

Four of 16 experts read each token, beside a shared MLP, in three of the four layers. The module for multi-token
prediction has experts too. Texts and tokenizer are those of `tiny_hybrid`. `--twin FOLDER` also trains a dense model
whose MLPs have the size of the parameters that read a token, and prints both losses.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_hybrid import LENGTH, VOCABULARY, on_progress, rounded, texts, write

import specjax
from specjax.models import LlamaConfig, init_params, make_model
from specjax.models.experts.routing import Routing
from specjax.models.experts.sizes import MixtureSizes
from specjax.models.heads.mtp import MtpConfig, of_target
from specjax.training import new_head, recipe_of, train

EXPERTS, CHOSEN, HIDDEN = 16, 4, 32  # HIDDEN: units of an expert and of the shared MLP
SIZES = MixtureSizes(
    EXPERTS, HIDDEN, Routing(CHOSEN, "sigmoid", normalized=True, epsilon=1e-20, group_score="two_best"),
    shared_width=HIDDEN, correction=True, dense_layers=(0,),
)  # fmt: skip


def config(experts: bool = True) -> LlamaConfig:
    """Return the shapes. Without experts, the MLPs have the size of the experts that read a token."""
    return LlamaConfig(
        vocab_size=VOCABULARY, width=64, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=32,
        mlp_width=(CHOSEN + 1) * HIDDEN, rotary_dim=16, norm_eps=1e-6, rope_base=10_000.0, max_positions=2048,
        tied=True, experts=SIZES if experts else None, name="tiny-mixture" if experts else "tiny-dense",
    )  # fmt: skip


def module_config() -> MtpConfig:
    """Return the shapes of the module, whose layer has experts."""
    of_dense = of_target(config())
    return dataclasses.replace(
        of_dense, layer=dataclasses.replace(of_dense.layer, experts=SIZES._replace(dense_layers=()))
    )


def untrained(seed: int, experts: bool = True) -> specjax.Target:
    """Return the model with random parameters."""
    shapes = config(experts)
    return specjax.Target(make_model(shapes), init_params(shapes, jax.random.key(seed)))


def module_tensors(params: Any) -> dict[str, Any]:
    """Return the tensors of a module, whose layer has the number behind those of the model."""
    layer = params["stack"][0]
    attention, feed = layer["attention"], layer["mlp"]
    arrays = {
        "enorm": params["embedding_norm"], "hnorm": params["state_norm"], "eh_proj": params["fc"],
        "shared_head.norm": params["norm"], "input_layernorm": layer["attention_norm"],
        "post_attention_layernorm": layer["mlp_norm"], "mlp.gate": feed["router"],
        **{f"self_attn.{name}_proj": attention[name] for name in "qkvo"},
        **{f"mlp.shared_experts.{name}_proj": feed["shared"][name] for name in ("gate", "up", "down")},
    }  # fmt: skip
    tensors = {f"{name}.weight": np.asarray(part["weight"]) for name, part in arrays.items()}
    tensors["mlp.gate.e_score_correction_bias"] = np.asarray(feed["router"]["correction"])
    for name in ("gate", "up", "down"):
        matrices = np.asarray(feed[f"expert_{name}"]["weight"])
        tensors |= {f"mlp.experts.{i}.{name}_proj.weight": matrix for i, matrix in enumerate(matrices)}
    return {f"model.layers.{config().num_layers}.{name}": np.ascontiguousarray(x) for name, x in tensors.items()}


def loss(target: specjax.Target, lessons: list) -> float:
    """Return the mean loss per token of texts, each read alone."""
    model = target.model

    @jax.jit
    def of_text(params, tokens):
        cache = model.init_cache(params, None, 1, LENGTH)
        path = jnp.arange(LENGTH)
        logits = model.forward(
            params, tokens[None], cache, positions=path[None], mask=(path[:, None] >= path)[None]
        )[0].logits  # fmt: skip
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), tokens[1:, None], -1)[:, 0]

    losses = []
    for lesson in lessons:
        tokens = lesson.tokens[:LENGTH]
        padded = np.pad(np.asarray(tokens), (0, LENGTH - len(tokens)))
        losses += np.asarray(of_text(target.params, padded))[: len(tokens) - 1].tolist()
    return float(np.mean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of the model")
    parser.add_argument("--run", required=True, type=Path, help="folder of the state of the training")
    parser.add_argument("--twin", action="store_true", help="also train the dense model, and print both losses")
    parser.add_argument("--stories", type=int, default=8000, help="for the model; its module has a third of them")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = {"rows": args.rows, "length": LENGTH, "seed": args.seed, "evaluate_every": 50, "on_progress": on_progress}
    lessons, held_out = texts(args.stories, args.seed + 1), texts(100, args.seed + 2)
    recipe = recipe_of("fastdraft_pretraining", optimizer="muon", learning_rate=1e-2, tables=1.0)
    target = rounded(train(None, untrained(args.seed), lessons, recipe=recipe, folder=args.run / "model", **shape))
    print(f"mixture: loss {loss(target, held_out):.4f} of texts that were not trained", flush=True)
    if args.twin:
        twin = train(None, untrained(args.seed, False), lessons, recipe=recipe, folder=args.run / "twin", **shape)
        print(f"dense twin: loss {loss(twin, held_out):.4f}", flush=True)
    module = new_head("mtp", module_config(), target, jax.random.key(args.seed))
    module = train(target, module, lessons[: args.stories // 3], folder=args.run / "module", **shape)
    write(args.out, config(), target, module_tensors, module, "num_nextn_predict_layers")


if __name__ == "__main__":
    main()
