"""XLNet against the class of transformers, with tiny random weights in files of its own format."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import XLNetConfig, XLNetLMHeadModel

from specjax import UsageError, decoders
from specjax.decoders.any_subset import content_mask, token_order

VOCAB, SIZE, MASK = 20, 7, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model as `save_pretrained` writes it, with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("xlnet")
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=32, initializer_range=0.5)
    model = XLNetLMHeadModel(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "bias" in name or "mask_emb" in name:
                x.normal_(std=0.5)
    model.save_pretrained(place)
    vocab = {piece: i for i, piece in enumerate([*"0123ab", "<mask>", *"cdefghijklmno"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.save(str(place / "tokenizer.json"))
    return place, model


def test_logits_are_those_of_transformers(folder):
    """Two rows with missing tokens in another order than their positions, in all ranks at once."""
    place, model = folder
    ours, tokenizer = decoders.load_any_order(place)
    assert (ours.vocab_size, ours.mask_token, tokenizer.encode("ab<mask>c")) == (VOCAB, MASK, [4, 5, 6, 7])
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, SIZE)).astype(np.int32)
    missing = np.array([[0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 1, 0, 1, 0]], bool)
    order = token_order(jnp.asarray(missing), jnp.full((2,), SIZE))
    content = content_mask(order)
    positions = jnp.asarray([[1, 3, 4, 6], [0, 3, 5, 3]])
    query = order.rank[:, None, :] < jnp.take_along_axis(order.rank, positions, 1)[:, :, None]
    logits = jax.jit(ours.apply)(ours.params, jnp.asarray(tokens), content, positions, query)
    # In transformers, a query reads what perm_mask allows, and a content token that and itself.
    for row in range(2):
        for i, position in enumerate(positions[row].tolist()):
            hidden = torch.tensor(~np.asarray(content[row]), dtype=torch.float32)
            hidden[position] = torch.tensor(~np.asarray(query[row, i]), dtype=torch.float32)
            mapping = torch.zeros(1, 1, SIZE)
            mapping[0, 0, position] = 1
            with torch.no_grad():
                wanted = model(
                    torch.tensor(tokens[row : row + 1]).long(), perm_mask=hidden[None], target_mapping=mapping
                ).logits[0, 0]
            np.testing.assert_allclose(logits[row, i], wanted.numpy(), atol=2e-4)


def test_missing_tokens_are_filled_in_any_window(folder):
    model, tokenizer = decoders.load_any_order(folder[0])
    prompts = [tokenizer.encode(text) for text in ("a<mask>b<mask><mask>c", "abc")]
    tokens, missing, lengths = decoders.blank_prompts(model, prompts, 3)
    assert missing.sum(1).tolist() == [3, 3] and lengths.tolist() == [6, 6]
    texts = [
        decoders.any_subset(model, tokens, missing, lengths=lengths, key=0, window=window, temperature=0.0)
        for window in (1, 3)
    ]
    np.testing.assert_array_equal(texts[0].filled, texts[1].filled)
    assert texts[0].filled[1, :3].tolist() == prompts[1] and MASK not in np.asarray(texts[0].filled)
    assert int(texts[1].stats.target_passes.max()) <= 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "is no any-order model .*give the folder of an XLNet language model"),
        ({"attn_type": "uni"}, "an any-order model reads both ways"),
        ({"ff_activation": "tanh"}, "ff_activation"),
        ({"n_layer": 3}, "has no tensor layer"),
        ({"vocab_size": 21}, "has no tensor word_embedding"),
    ],
)
def test_other_models_are_refused(folder, tmp_path, changes, words):
    for file in folder[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=words):
        decoders.load_any_order(tmp_path)
