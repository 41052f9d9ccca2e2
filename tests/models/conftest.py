"""Shared fixtures of the model tests: tiny Hugging Face folders, a reference in torch, and a driver of `Model`."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

VOCAB = 96
LENGTHS = (18, 11)  # of the two texts of a ragged batch


@pytest.fixture(scope="session")
def data() -> Path:
    """Return the folder of test files."""
    return Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def weights():
    """Return `weights(file name)`, a real model file from $SPECJAX_MODELS or ~/.cache/specjax/models. It skips without
    it.
    """

    def find(name: str) -> Path:
        folder = Path(os.environ.get("SPECJAX_MODELS", "~/.cache/specjax/models")).expanduser()
        if not (folder / name).exists():
            pytest.skip(f"needs {name} in $SPECJAX_MODELS or ~/.cache/specjax/models")
        return folder / name

    return find


@pytest.fixture(scope="session")
def texts() -> np.ndarray:
    """Return random tokens int32[2, 18]. The second text counts only to LENGTHS[1]."""
    return np.random.default_rng(0).integers(0, VOCAB, (2, max(LENGTHS))).astype(np.int32)


def hf_model(kind: str, **changes):
    """Build a tiny torch model of a Hugging Face `model_type` with weights so large that every part matters."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes))
    return loud(transformers.AutoModelForCausalLM.from_config(config), kind.startswith("gemma"))


def loud(model, centred: bool = False):
    """Set random weights everywhere. centred: its norms store w and multiply by 1 + w."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                p.copy_((0.0 if centred else 1.0) + 0.3 * noise)
            elif p.ndim == 1:
                p.copy_(0.3 * noise)
            else:
                p.copy_(noise * 2 * p.shape[1] ** -0.5)
    return model.eval()


def save(model, folder: Path, **options) -> Path:
    """Save the model as a Hugging Face folder with a small tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    model.save_pretrained(folder, **options)
    words = {"<unk>": 0, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def reference(model, texts) -> tuple[list, list]:
    """Compute logits [T, V] of each text, and its hidden states [layers + 1, T, D] (last: after the norm)."""
    import torch

    logits, hidden = [], []
    for text, length in zip(texts, LENGTHS, strict=True):
        with torch.no_grad():
            out = model.float()(torch.tensor(text[None, :length], dtype=torch.long), output_hidden_states=True)
        logits.append(out.logits[0].numpy())
        hidden.append(np.stack([h[0].numpy() for h in out.hidden_states]))
    return logits, hidden


@functools.cache
def jitted(model, taps):
    """Return one program per model and taps: forward, and commit of the first `num_nodes` tokens."""

    @jax.jit
    def run(params, tokens, cache, num_nodes):
        width = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(width)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (tokens.shape[0], width, width))
        out, pending = model.forward(params, tokens, cache, positions=positions, mask=mask, taps=taps)
        path = jnp.broadcast_to(jnp.arange(width), tokens.shape)
        return out, model.commit(cache, pending, path, num_nodes)

    return run


def ours(target, texts, cut: tuple[int, int] = (0, 0), taps=()):
    """Compute (logits, taps, hidden) of each text of the ragged batch, with `cut[b]` tokens of row b committed first.

    Both pieces have the same width, so they share a program.
    """
    model, params = target.model, target.params
    cache, run = model.init_cache(params, None, 2, texts.shape[1] + 32), jitted(model, taps)
    width = max(n - c for n, c in zip(LENGTHS, cut, strict=True))
    pieces: list[list] = [[], []]
    for start, stop in ((0, 0), cut), (cut, LENGTHS):
        counts = [b - a for a, b in zip(start, stop, strict=True)]
        if not any(counts):
            continue
        tokens = np.stack([np.resize(texts[b, start[b] :], width) for b in range(2)])
        out, cache = run(params, jnp.asarray(tokens), cache, jnp.array(counts))
        for b in range(2):
            pieces[b].append([np.asarray(x[b, : counts[b]]) for x in (out.logits, *out.taps, out.hidden)])
    rows = [[np.concatenate(parts) for parts in zip(*row, strict=True)] for row in pieces]
    return [row[0] for row in rows], [row[1:-1] for row in rows], [row[-1] for row in rows]


@pytest.fixture(scope="session")
def tiny():
    """Return the functions above, for tests that cannot import a neighbour."""
    from types import SimpleNamespace

    return SimpleNamespace(
        model=hf_model, loud=loud, save=save, reference=reference, ours=ours, vocab=VOCAB, lengths=LENGTHS
    )
