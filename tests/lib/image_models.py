"""Tiny folders of models that read images, with random weights in the form of transformers."""

import json

import numpy as np
import tokenizers
from chunked_logits import logits_in_chunks

IMAGE = 59  # the placeholder
SPECIAL = {"<image>": IMAGE, "<fake_token_around_image>": 60, "<global-img>": 61, "<end_of_utterance>": 70}
GRID = {f"<row_{row}_col_{column}>": 59 + 2 * row + column for row in (1, 2) for column in (1, 2)}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %} {{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance> {% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "max_image_size": {"longest_edge": 24},
    "size": {"longest_edge": 48}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
}  # fmt: skip
TEXT = {
    "model_type": "llama", "vocab_size": 71, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 24,
    "patch_size": 4,
}  # fmt: skip


def sharpen(model):
    """Fill a model with weights for which every input matters."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 or name.endswith("class_embedding"):
                weight.copy_(torch.randn_like(weight) * (0.15 if weight.ndim > 2 else 0.25))
            else:
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in name and "bias" not in name else 0.0))


def write_tokenizer(folder, template=TEMPLATE):
    """Write a tokenizer of words w3, w4, ... with the tokens of images."""
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, IMAGE)}, **SPECIAL, **GRID}
    words |= {name: 66 + i for i, name in enumerate(("user", "assistant", ":", "system"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*SPECIAL, *GRID])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))


def write_processor(folder, **changes):
    """Write the settings of an image processor."""
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | changes))


def random_tiles(count, seed=0):
    """Return random pixels of tiles."""
    return np.random.default_rng(seed).normal(size=(count, 3, 24, 24)).astype(np.float32)


def padded_logits(target, prompts, inputs, chunk):
    """Return the logits of prompts, read in chunks of tokens; prompts are padded to the longest."""
    length = max(map(len, prompts))
    return logits_in_chunks(target, [prompt + [0] * (length - len(prompt)) for prompt in prompts], inputs, chunk)
