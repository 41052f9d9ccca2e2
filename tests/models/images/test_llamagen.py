"""LlamaGen beside a model in PyTorch that is written here, because transformers has none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import UsageError, decode, save_model, trees
from specjax.drafters import autoregressive, jacobi, two_model
from specjax.models import captions, guided, read_llamagen, unconditional, unconditional_captions

torch = pytest.importorskip("torch")

CODES, CLASSES, WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, GRID = 29, 5, 32, 2, 2, 2, 48, 3
NONE = CODES + CLASSES
SCALE = 2.5


@functools.cache
def tensors():
    """Return random weights under the names of the released files."""
    torch.manual_seed(0)
    size = WIDTH // HEADS
    shapes = {
        "tok_embeddings": (CODES, WIDTH), "cls_embedding.embedding_table": (CLASSES + 1, WIDTH), "norm": (WIDTH,),
        "output": (CODES, WIDTH),
    }  # fmt: skip
    for n in range(LAYERS):
        shapes |= {
            f"layers.{n}.attention.wqkv": ((HEADS + 2 * KV_HEADS) * size, WIDTH),
            f"layers.{n}.attention.wo": (WIDTH, WIDTH), f"layers.{n}.feed_forward.w1": (HIDDEN, WIDTH),
            f"layers.{n}.feed_forward.w3": (HIDDEN, WIDTH), f"layers.{n}.feed_forward.w2": (WIDTH, HIDDEN),
            f"layers.{n}.attention_norm": (WIDTH,), f"layers.{n}.ffn_norm": (WIDTH,),
        }  # fmt: skip
    random = {f"{name}.weight": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    return {name: x + 1 if x.ndim == 1 else x for name, x in random.items()}


@functools.cache
def target():
    return read_llamagen(tensors(), HEADS, grid=GRID)


def table(zero_condition=True, condition=1):
    """Return cosines and sines [places, h / 2] of the condition and then the grid."""
    size = WIDTH // HEADS
    rates = 1 / 10000 ** (torch.arange(0, size // 2, 2)[: size // 4] / (size // 2))
    place = torch.arange(GRID * GRID)
    angles = torch.cat([torch.outer(place // GRID, rates), torch.outer(place % GRID, rates)], 1)
    first = (torch.zeros if zero_condition else torch.ones)(condition, size // 2)
    return torch.cat([first, angles.cos()]), torch.cat([torch.zeros(condition, size // 2), angles.sin()])


def turned(x, cos, sin):
    """Rotate neighbouring pairs of x [T, H, h]."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[: len(x), None], sin[: len(x), None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def normed(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def their_logits(number, codes, **options):
    """Return the logits [1 + codes, CODES] of the tokens after a class and codes."""
    w = {name.removesuffix(".weight"): x for name, x in tensors().items()}
    x = torch.cat([w["cls_embedding.embedding_table"][[number]], w["tok_embeddings"][list(codes)]])
    return layers_of(x, torch.ones(len(x), len(x)).tril().bool(), *table(**options))


def layers_of(x, mask, cos, sin):
    """Return the logits [T, CODES] of vectors x [T, D]."""
    w = {name.removesuffix(".weight"): x for name, x in tensors().items()}
    count, size = len(x), WIDTH // HEADS
    for n in range(LAYERS):
        part = lambda name, n=n: w[f"layers.{n}.{name}"]
        y = normed(x, part("attention_norm")) @ part("attention.wqkv").T
        q, k, v = y.reshape(count, 3, HEADS, size).unbind(1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        scores = torch.einsum("thd,shd->hts", q, k) / size**0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        x = x + torch.einsum("hts,shd->thd", scores.softmax(-1), v).reshape(count, -1) @ part("attention.wo").T
        y = normed(x, part("ffn_norm"))
        gate = torch.nn.functional.silu(y @ part("feed_forward.w1").T)
        x = x + (gate * (y @ part("feed_forward.w3").T)) @ part("feed_forward.w2").T
    return (normed(x, w["norm"]) @ w["output"].T).numpy()


@functools.cache
def their_image(number, scale):
    """Return the greedy codes of an image of a class under guidance."""
    codes = []
    for _ in range(GRID * GRID):
        c, u = (their_logits(label, codes)[-1] for label in (number, CLASSES))
        codes.append(int((u + scale * (c - u)).argmax()))
    return codes


def test_logits_are_those_of_the_oracle():
    """The condition has no angle: with an identity rotation the oracle has other logits."""
    text = [CODES + 3, *np.random.default_rng(0).integers(0, CODES, GRID * GRID - 1).tolist()]
    model, size = target().model, len(text)
    path = jnp.arange(size)[None]
    logits = jax.jit(model.forward)(
        target().params, jnp.asarray([text]), model.init_cache(target().params, None, 1, 128), positions=path,
        mask=jnp.tril(jnp.ones((1, size, size), bool)),
    )[0].logits[0]  # fmt: skip
    np.testing.assert_allclose(logits[:, :CODES], their_logits(3, text[1:]), atol=2e-4)
    assert np.isneginf(logits[:, CODES:]).all()
    assert not np.allclose(logits[:, :CODES], their_logits(3, text[1:], zero_condition=False), atol=1e-2)


@pytest.mark.parametrize(
    "drafter", [autoregressive(), jacobi(NONE + 1, window=4, ids=(0, CODES))], ids=["plain", "SJD"]
)
def test_guided_images_are_those_of_the_oracle(drafter):
    """Two images of different classes in one batch, in both orders of the steps."""
    result = decode(
        guided(target(), SCALE), drafter, [[CODES + 1], [CODES + 4]], key=0, max_new_tokens=GRID * GRID,
        inputs=unconditional([[NONE]] * 2),
    )  # fmt: skip
    assert result.to_lists() == [their_image(1, SCALE), their_image(4, SCALE)]
    assert target().model.config.unconditional_class == NONE


PLACES, FEATURES = 5, 12


@functools.cache
def text_tensors():
    """Return the weights of a model of captions, whose decoder is that of `tensors`."""
    torch.manual_seed(1)
    condition = {
        "cap_proj.fc1.weight": torch.randn(WIDTH, FEATURES) * 0.5,
        "cap_proj.fc2.weight": torch.randn(WIDTH, WIDTH) * 0.5,
        "uncond_embedding": torch.randn(PLACES, FEATURES),
    }
    decoder = {name: x for name, x in tensors().items() if not name.startswith("cls_embedding")}
    return decoder | {f"cls_embedding.{name}": x for name, x in condition.items()}


@functools.cache
def text_target():
    return read_llamagen(text_tensors(), HEADS, grid=GRID)


def features():
    """Return the features of two captions of different lengths."""
    rng = np.random.default_rng(5)
    return [rng.normal(size=(count, FEATURES)).astype(np.float32) for count in (3, PLACES - 1)]


def their_caption_logits(row, codes, is_given=True):
    """Return the logits [1 + codes, CODES] after a caption that is padded on the left, as in the released code."""
    w, conditional = text_tensors(), torch.tensor(features()[row])
    padding = PLACES - len(conditional)
    rows = torch.cat([torch.zeros(padding, FEATURES), conditional]) if is_given else w["cls_embedding.uncond_embedding"]
    hidden = torch.nn.functional.gelu(rows @ w["cls_embedding.cap_proj.fc1.weight"].T, approximate="tanh")
    x = torch.cat([hidden @ w["cls_embedding.cap_proj.fc2.weight"].T, w["tok_embeddings.weight"][list(codes)]])
    mask = torch.ones(len(x), len(x)).tril().bool()
    mask[:, :padding] = False  # both rows of a pair hide the padding of the given caption
    mask |= torch.eye(len(x)).bool()
    return layers_of(x, mask, *table(condition=PLACES))[PLACES - 1 :]


@functools.cache
def their_caption_image(row, scale):
    codes = []
    for _ in range(GRID * GRID):
        c, u = (their_caption_logits(row, codes, is_given)[-1] for is_given in (True, False))
        codes.append(int((u + scale * (c - u)).argmax()))
    return codes


DRAFTERS = {
    "plain": autoregressive,
    "SJD": lambda: jacobi(CODES + 1, window=4, ids=(0, CODES)),
    "tree": lambda: two_model(guided(text_target(), 1.5), tree=trees.parse("top:3x2x1")),
}


def caption_image(drafter, null=None):
    conditional = captions(text_target(), features())
    prompts = [[CODES] * len(x) for x in features()]
    null = null or unconditional_captions(text_target(), conditional)
    return decode(
        guided(text_target(), SCALE), drafter, prompts, key=0, max_new_tokens=GRID * GRID,
        inputs=unconditional(prompts, inputs=(conditional, null)),
    ).to_lists()  # fmt: skip


def test_logits_after_captions_are_those_of_the_oracle():
    """Two captions of different lengths in one batch. They have no padding, and the oracle hides its own."""
    conditional, codes = captions(text_target(), features()), np.random.default_rng(0).integers(0, CODES, 4).tolist()
    model, width = text_target().model, PLACES - 1 + len(codes)
    texts = [[*[CODES] * len(x), *codes] for x in features()]
    tokens = jnp.asarray([text + [0] * (width - len(text)) for text in texts])
    path = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (2, width, width))
    cache = model.init_cache(text_target().params, conditional, 2, 128)
    logits = jax.jit(model.forward)(text_target().params, tokens, cache, positions=path, mask=mask)[0].logits
    for row, (x, text) in enumerate(zip(features(), texts, strict=True)):
        ours = logits[row, len(x) - 1 : len(text), :CODES]
        np.testing.assert_allclose(ours, their_caption_logits(row, codes), atol=3e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_guided_images_of_captions(name):
    assert caption_image(DRAFTERS[name]()) == [their_caption_image(row, SCALE) for row in range(2)]


def test_the_first_vectors_of_the_unconditional_caption_fail():
    """A mutant pads the unconditional caption on the other side."""
    table = np.asarray(text_tensors()["cls_embedding.uncond_embedding"])
    null = captions(text_target(), [table[: len(x)] for x in features()])
    assert caption_image(autoregressive(), null) != [their_caption_image(row, SCALE) for row in range(2)]


def test_other_captions_are_refused():
    with pytest.raises(UsageError, match=r"caption 0 have the shape \[2, 7\], which must be 1 to 5 vectors of 12"):
        captions(text_target(), [np.zeros((2, 7))])
    with pytest.raises(UsageError, match="reads no captions; read a text-conditional LlamaGen checkpoint"):
        captions(target(), features())
    with pytest.raises(UsageError, match="inputs of llamagen_t2i must be captions"):
        decode(
            guided(text_target(), 2.0),
            autoregressive(),
            [[CODES]],
            key=0,
            max_new_tokens=2,
            inputs=unconditional([[CODES]]),
        )


@pytest.mark.parametrize("count", [1, 3, PLACES])
def test_prompts_have_a_placeholder_per_vector(count):
    """The vectors of a caption replace the first tokens, so a prompt that is too short would lose codes."""
    conditional = captions(text_target(), features()[:1])
    null = unconditional_captions(text_target(), conditional)
    right = [[CODES] * len(features()[0])]
    options = {"key": 0, "max_new_tokens": 2}

    def guided_image(prompts, null_prompts):
        inputs = unconditional(null_prompts, inputs=(conditional, null))
        return decode(guided(text_target(), 2.0), autoregressive(), prompts, inputs=inputs, **options)

    message = rf"^{{}}prompt 0 has {count} placeholders \(token {CODES}\), and its caption 3 vectors"
    decode(text_target(), autoregressive(), [[*right[0], 4, 5]], inputs=conditional, **options)  # a part of an image
    if count == 3:
        guided_image(right, right)
        return
    with pytest.raises(UsageError, match=message.format("")):
        decode(text_target(), autoregressive(), [[CODES] * count], inputs=conditional, **options)
    with pytest.raises(UsageError, match=message.format("")):
        guided_image([[CODES] * count], right)
    with pytest.raises(UsageError, match=message.format("unconditional ")):
        guided_image(right, [[CODES] * count])


def test_what_is_no_caption_is_refused():
    for features_of in (["a"], [[[1.0], [1.0, 2.0]]], [[[1.0] * 7]]):
        with pytest.raises(UsageError, match="the features of caption 0 have the shape"):
            captions(text_target(), features_of)
    with pytest.raises(UsageError, match="there are no captions"):
        captions(text_target(), [])
    conditional = captions(text_target(), features())
    for inputs in (conditional, (conditional,)):
        with pytest.raises(UsageError, match="inputs of unconditional prompts must be a pair"):
            unconditional([[CODES]] * 2, inputs=inputs)
    with pytest.raises(UsageError, match="reads no captions"):
        unconditional_captions(target(), conditional)


def test_tensors_of_other_dtypes(tmp_path):
    """Parameters and bfloat16 are read. A config.json cannot describe the model."""
    other = {name: torch.nn.Parameter(x.bfloat16()) for name, x in tensors().items()}
    rounded = {name: x.bfloat16().float() for name, x in tensors().items()}
    jax.tree.map(
        np.testing.assert_array_equal, read_llamagen(other, HEADS, grid=GRID).params,
        read_llamagen(rounded, HEADS, grid=GRID).params,
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"no config\.json can describe llamagen"):
        save_model(tmp_path, target())


def test_other_checkpoints_are_refused():
    with pytest.raises(UsageError, match=r"output\.weight is not in the checkpoint; give the tensors"):
        read_llamagen({name: x for name, x in tensors().items() if name != "output.weight"}, HEADS)
    with pytest.raises(UsageError, match="num_heads must divide the width 32"):
        read_llamagen(tensors(), 3)
    with pytest.raises(UsageError, match="num_heads must be a whole number of at least 1, not 0"):
        read_llamagen(tensors(), 0)
    with pytest.raises(UsageError, match="grid must be a whole number of at least 1, not 0"):
        read_llamagen(tensors(), HEADS, grid=0)
