"""Folders of reward models score as their authors' classes do, and load nowhere else."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tiers import exhaustive

from specjax.collaborate import load_reward
from specjax.errors import UsageError
from specjax.models import load
from specjax.models.loading.decision_heads import save_judge

LENGTHS = np.array([18, 11])


def auto(tiny, kind, task, **changes):
    """Build a tiny torch classifier with weights so large that every part matters."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes))
    return tiny.loud(getattr(transformers, f"AutoModelFor{task}").from_config(config), kind.startswith("gemma"))


def logits_of(model, texts):
    """Return the logits [2, labels] of transformers at the end of each text."""
    import torch

    rows = []
    for text, length in zip(texts, LENGTHS, strict=True):
        with torch.no_grad():
            rows.append(model(torch.tensor(text[None, :length], dtype=torch.long)).logits[0].numpy())
    return np.stack([row if row.ndim == 1 else row[-1] for row in rows])


def scores(reward, texts):
    return np.asarray(reward(jnp.asarray(texts), jnp.zeros(2, jnp.int32), jnp.asarray(LENGTHS), jnp.ones(2, bool)))


KINDS = [
    ("qwen2", "SequenceClassification", 1), ("llama", "TokenClassification", 2),
    ("gemma2", "SequenceClassification", 2),
    exhaustive("qwen3", "SequenceClassification", 1), exhaustive("mistral", "SequenceClassification", 1),
    exhaustive("phi3", "TokenClassification", 2), exhaustive("gemma3_text", "SequenceClassification", 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "task", "labels"), KINDS)
def test_scores_are_those_of_transformers(tiny, texts, tmp_path, kind, task, labels):
    model = auto(tiny, kind, task, num_labels=labels)
    folder = tiny.save(model, tmp_path)
    reward, tokenizer = load_reward(folder, link="identity")
    logits = logits_of(model, texts)
    log_odds = logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0]
    np.testing.assert_allclose(scores(reward, texts), log_odds, rtol=1e-4, atol=1e-4)
    assert np.abs(log_odds[0] - log_odds[1]) > 1e-2 and tokenizer.eos
    probability = scores(load_reward(folder)[0], texts)
    np.testing.assert_allclose(probability, 1 / (1 + np.exp(-log_odds)), rtol=1e-4)
    with pytest.raises(UsageError, match="a classifier or reward model; use a language model"):
        load(folder)


@pytest.mark.parametrize("form", ["trl", "qwen"])
def test_heads_of_authors_without_a_class_in_transformers(tiny, texts, tmp_path, form):
    """TRL's and Skywork's value head, and Qwen's head with a hidden layer, in NumPy."""
    from safetensors.numpy import load_file, save_file

    folder = tiny.save(tiny.model("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(0)
    layer = lambda out: (draw.normal(size=(out, 32)).astype(np.float32), draw.normal(size=out).astype(np.float32))
    _, hidden = tiny.reference(tiny.model("qwen2"), texts)
    h = np.stack([states[-1][-1] for states in hidden]).astype(np.float64)
    if form == "trl":
        weight, bias = layer(1)
        head = {"v_head.summary.weight": weight, "v_head.summary.bias": bias}
        tensors = {f"pretrained_model.{name}": x for name, x in tensors.items()}
        wanted, name = (h @ weight.T + bias)[:, 0], "Qwen2ForPrmModel"
    else:
        first, second = layer(32), layer(2)
        names = "score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias"
        head = dict(zip(names, (*first, *second), strict=True))
        both = np.maximum(h @ first[0].T + first[1], 0) @ second[0].T + second[1]
        wanted, name = both[:, 1] - both[:, 0], "Qwen2ForProcessRewardModel"
    save_file(tensors | head, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    mapped = {"auto_map": {"AutoModel": f"modeling_qwen2_rm.{name}"}, "architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config | mapped))
    reward, _ = load_reward(folder, link="identity")
    np.testing.assert_allclose(scores(reward, texts), wanted, rtol=1e-4, atol=1e-4)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["GteForSequenceClassification"]}))
    with pytest.raises(
        UsageError, match='"GteForSequenceClassification" in architectures, which is no reward model of'
    ):
        load_reward(folder)


def test_any_model_and_the_file_of_a_head(tiny, texts, tmp_path):
    folder = tiny.save(tiny.model("llama"), tmp_path / "model")
    weight = np.random.default_rng(1).normal(size=32).astype(np.float32)
    save_judge(tmp_path / "head.safetensors", weight, 0.25)
    reward, _ = load_reward(folder, tmp_path / "head.safetensors", suffix="w5")
    with_suffix = [np.append(text[:length], 5) for text, length in zip(texts, LENGTHS, strict=True)]
    hidden = [states[-1][-1] for states in reference(tiny, with_suffix)]
    odds = np.stack(hidden).astype(np.float64) @ weight + 0.25
    np.testing.assert_allclose(scores(reward, texts), 1 / (1 + np.exp(-odds)), rtol=1e-4, atol=1e-5)


def reference(tiny, rows):
    """Return the hidden states of texts of any length."""
    import torch

    model, states = tiny.model("llama"), []
    for row in rows:
        with torch.no_grad():
            out = model.float()(torch.tensor(row[None], dtype=torch.long), output_hidden_states=True)
        states.append(np.stack([h[0].numpy() for h in out.hidden_states]))
    return states


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_labels": 3}, "no weight with one or two rows, one per label"),
        (None, r"has no head of a reward model \(score.weight or v_head"),
    ],
)
def test_other_folders_are_refused(tiny, tmp_path, changes, words):
    model = tiny.model("qwen2") if changes is None else auto(tiny, "qwen2", "SequenceClassification", **changes)
    with pytest.raises(UsageError, match=words):
        load_reward(tiny.save(model, tmp_path))


def test_a_file_is_no_folder_of_a_reward_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is not the folder of a reward model; for other models give the file of a"):
        load_reward(tmp_path / "model.gguf")
