"""Greedy output of every method against plain decoding, and of plain decoding against `transformers`, on real weights.

    python benchmarks/real_equality.py PROMPTS.jsonl --limit 64 --max-new-tokens 128 [--transformers]

SmolLM2-135M-Instruct in float32, prompts of a Spec-Bench file taken evenly. Two-model drafting uses the first 8 of the
30 layers of the target as its draft, since no smaller model shares the vocabulary. Differences are listed with the gap
between the two best logits at the first one: below 1e-3 it is a near-tie that the width of the pass decides.
Exit code 1 if a method differs from plain decoding.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

import jax
import numpy as np

import specjax
from specjax.cli.measure import next_logits
from specjax.configs import smollm2_135m
from specjax.models import LlamaConfig, make_model


def first_layers(target: specjax.Target, config: LlamaConfig, layers: int) -> specjax.Target:
    """The target cut after its first layers, with its own head."""
    cut = dataclasses.replace(config, num_layers=layers)
    params = dict(target.params, layers={i: target.params["layers"][i] for i in range(layers)})
    return specjax.Target(make_model(cut), params)


BATCH = 8


def gap(target, prompt, common) -> float:
    """Distance of the two best logits after prompt + common."""
    best = np.sort(next_logits(target, [*prompt, *common]))[-2:]
    return float(best[1] - best[0])


def differences(target, prompts, ours, theirs) -> list[dict]:
    """First difference per prompt, with the gap there."""
    found = []
    for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found.append({"prompt": i, "position": at, "gap": gap(target, prompt, a[:at])})
    return found


def decode_all(target, drafter, prompts, max_new_tokens, eos) -> tuple[list[list[int]], int]:
    """Texts of all prompts, in ragged batches of prompts of similar length, and the target passes of all rows."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: list[list[int]] = [[] for _ in prompts]
    passes = 0
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        result = specjax.decode(
            target,
            drafter,
            [prompts[i] for i in chosen],
            key=jax.random.key(0),
            max_new_tokens=max_new_tokens,
            eos=eos,
        )
        passes += int(result.stats.target_passes.sum())
        for i, row in zip(chosen, result.to_lists(), strict=True):
            rows[i] = row
    return rows, passes


def with_transformers(target, prompts, max_new_tokens, eos) -> list[list[int]]:
    """Greedy texts of the same float32 weights in `transformers` (torch)."""
    import torch
    from transformers import LlamaConfig as HFConfig
    from transformers import LlamaForCausalLM

    model = hf_model(target, HFConfig, LlamaForCausalLM, torch)
    texts = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos),
                pad_token_id=0,
            )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def hf_model(target, config_class, model_class, torch):
    """SmolLM2 in torch with the weights of `target`."""
    model = model_class(
        config_class(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    p = target.params
    names = {"model.embed_tokens.weight": p["embed"]["weight"], "model.norm.weight": p["norm"]["weight"]}
    for i in range(30):
        layer, prefix = p["layers"][i], f"model.layers.{i}"
        names[f"{prefix}.input_layernorm.weight"] = layer["attention_norm"]["weight"]
        names[f"{prefix}.post_attention_layernorm.weight"] = layer["mlp_norm"]["weight"]
        for part in "qkvo":
            names[f"{prefix}.self_attn.{part}_proj.weight"] = layer["attention"][part]["weight"]
        for part in ("gate", "up", "down"):
            names[f"{prefix}.mlp.{part}_proj.weight"] = layer["mlp"][part]["weight"]
    state = {name: torch.from_numpy(np.array(x)) for name, x in names.items()}
    missing, extra = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not extra, (missing, extra)
    model.tie_weights()
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--transformers", action="store_true", help="compare plain decoding with transformers too")
    parser.add_argument("--texts", help="write the plain texts, as token ids, to this JSON file")
    args = parser.parse_args()
    target, tokenizer = specjax.load(dtype="float32")
    with open(args.prompts) as lines:
        turns = [json.loads(line)["turns"][0] for line in lines]
    turns = [turns[i] for i in np.linspace(0, len(turns) - 1, min(args.limit, len(turns))).astype(int)]
    prompts = [tokenizer.chat(text) for text in turns]
    config = smollm2_135m.get_config()
    drafters = {
        name: specjax.make_drafter(name, target, first_layers(target, config, 8), **method.cpu_options)
        for name, method in specjax.METHODS.items()
    }
    texts: dict[str, list] = {}
    report: dict[str, object] = {"prompts": len(prompts), "max_new_tokens": args.max_new_tokens}
    for name, drafter in drafters.items():
        rows, passes = decode_all(target, drafter, prompts, args.max_new_tokens, tokenizer.eos)
        texts[name] = rows
        if args.texts and name == "autoregressive":
            with open(args.texts, "w") as file:
                json.dump({"prompts": prompts, "texts": rows}, file)
        found = differences(target, prompts, texts["autoregressive"], rows)
        report[name] = {"tokens_per_pass": sum(map(len, rows)) / passes, "differences": found}
        print(name, json.dumps(report[name]), flush=True)
    if args.transformers:
        theirs = with_transformers(target, prompts, args.max_new_tokens, tokenizer.eos)
        report["transformers"] = {"differences": differences(target, prompts, texts["autoregressive"], theirs)}
    print(json.dumps(report, indent=1))
    return int(any(report[name]["differences"] for name in drafters))  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
