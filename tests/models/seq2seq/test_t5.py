"""T5, Flan-T5, mT5 and umT5 beside `transformers`: logits with padded sources, trees, and greedy texts."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from chunked_logits import logits_in_chunks
from jax.interpreters import partial_eval as pe

import specjax
from specjax import UsageError
from specjax.bench import measure
from specjax.bench.near_ties import TextOrigin, find_difference
from specjax.cli import main
from specjax.models import sources
from specjax.types import Source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "d_model": 16, "d_kv": 12, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FORMS = {
    "t5": ("T5", {"feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "flan": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": ("UMT5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
SOURCES = [list(range(3, 43)), [7, 8, 9, 10, 11]]
"""Forty tokens reach the buckets of several distances."""


@functools.cache
def saved(form, folder):
    """Return a model of transformers with sharp random weights, saved to a folder."""
    name, options = FORMS[form]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            is_matrix = weight.ndim == 2
            weight.copy_(torch.randn_like(weight) * (0.25 if is_matrix else 0.2) + (0.0 if is_matrix else 1.0))
            if "relative_attention_bias" in key:
                weight.copy_(torch.randn_like(weight) * 2)
        if not options["tie_word_embeddings"]:
            model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder)
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 61)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


@pytest.fixture(scope="module", params=list(FORMS))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = saved(request.param, folder)
    return model, load(folder)


def load(folder):
    target, _ = specjax.load(str(folder))
    return target


def their_logits(model, texts):
    """Return the logits of texts of equal length, one for each source."""
    width = max(map(len, SOURCES))
    ids = torch.tensor([source + [0] * (width - len(source)) for source in SOURCES])
    mask = torch.tensor([[1] * len(source) + [0] * (width - len(source)) for source in SOURCES])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor(texts)).logits.numpy()


def texts_of(length):
    rng = np.random.default_rng(0)
    return [[0, *rng.integers(2, 61, length - 1).tolist()] for _ in SOURCES]


def our_logits(target, texts, chunk):
    """Return the logits of texts that are read in chunks of tokens."""
    return logits_in_chunks(target, texts, sources(SOURCES), chunk)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_logits_are_those_of_transformers(pair, chunk):
    model, target = pair
    texts = texts_of(40)
    np.testing.assert_allclose(our_logits(target, texts, chunk), their_logits(model, texts), atol=5e-4, rtol=0)


def test_siblings_of_a_tree_have_the_bias_of_their_depth(pair):
    """Score a tree with two branches in one pass; each branch has the logits of its text."""
    model, target = pair
    texts = texts_of(20)
    cache = target.model.init_cache(target.params, sources(SOURCES), 2, 64)
    forward = jax.jit(target.model.forward)
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((20, 20), bool)), (2, 20, 20))
    index = jnp.broadcast_to(jnp.arange(20), (2, 20))
    _, pending = forward(target.params, jnp.array(texts), cache, positions=index, mask=causal)
    cache = target.model.commit(cache, pending, index, jnp.array([20, 20]))
    branches = [[5, 6, 7], [8, 9, 10]]
    tokens = jnp.broadcast_to(jnp.array(branches).reshape(-1), (2, 6))
    positions = jnp.broadcast_to(20 + jnp.array([0, 1, 2, 0, 1, 2]), (2, 6))
    mask = jnp.broadcast_to(np.kron(np.eye(2), np.tril(np.ones((3, 3)))).astype(bool), (2, 6, 6))
    output, _ = forward(target.params, tokens, cache, positions=positions, mask=mask)
    for i, branch in enumerate(branches):
        theirs = their_logits(model, [text + branch for text in texts])[:, 20:]
        np.testing.assert_allclose(output.logits[:, 3 * i : 3 * i + 3], theirs, atol=5e-4, rtol=0)


def test_greedy_text_is_that_of_transformers(pair, request):
    """Decode both sources in one batch; each has the text that it has alone."""
    model, target = pair
    form = request.node.callspec.params["pair"]
    method = {"t5": "prompt_lookup", "flan": "auto", "mt5": "token_recycling", "umt5": "jacobi"}[form]
    ours = specjax.decode(
        target, method, [[0]] * len(SOURCES), key=0, inputs=sources(SOURCES), max_new_tokens=24, eos=1
    ).to_lists()
    for source, text in zip(SOURCES, ours, strict=True):
        theirs = model.generate(torch.tensor([source]), max_new_tokens=24, do_sample=False, use_cache=False)
        assert text == theirs[0, 1:].tolist()


def test_what_it_refuses(pair):
    target = pair[1]
    with pytest.raises(UsageError, match="inputs"):
        specjax.decode(target, "autoregressive", [[0]], key=0, max_new_tokens=2)
    for texts in ([[]], [], ["w3 w4"], [3, 4], [[1.5]]):
        with pytest.raises(UsageError, match="at least one token"):
            sources(texts)
    with pytest.raises(UsageError, match="length must be a whole number of at least 3, not 2"):
        sources([[5], [3, 4, 5]], length=2)


@pytest.mark.parametrize(
    ("source", "error"),
    [(sources([[5, 61]]), "source 0 has the token 61 at place 1"),
     (sources([[5, 1 << 40]]), "has the token 2147483647"),
     (sources([[-2]]), "has the token -1 at place 0"),
     (Source(np.ones((1, 4), np.int32), np.array([9])), "the length 9, but the array of sources has 4 columns"),
     (Source(np.ones((1, 4), np.int32), np.array([0])), "source 0 is empty"),
     (Source(np.ones((1, 4)), np.array([3])), "must be integers, not float"),
     (Source(np.ones(1, np.int32), np.array([3])), r"must have tokens\[B, S\]")],
)  # fmt: skip
def test_sources_that_are_no_tokens_of_the_model_are_refused(pair, source, error):
    target = pair[1]
    with pytest.raises(UsageError, match=error):
        specjax.decode(target, "autoregressive", [[0]], key=0, max_new_tokens=2, inputs=source)


def test_a_server_refuses_other_tokens_of_a_source(pair):
    one = lambda tokens: jax.tree.map(lambda x: x[0], sources([tokens]))
    requests = [specjax.Request([0], 0, inputs=one(tokens)) for tokens in ([5, 61], [5, 6])]
    served = list(specjax.serve(
        pair[1], "autoregressive", requests, slots=1, longest_prompt=4, max_new_tokens=2, inputs=requests[0].inputs
    ))  # fmt: skip
    errors = {answer.request: answer.error for answer in served}
    assert "source 0 has the token 61" in str(errors[0]) and errors[1] is None


def test_pruned_models(pair):
    """A model without its second layer has the logits of one whose second layer adds nothing."""
    target = pair[1]
    pruned = specjax.models.prune_layers(target, [0, 2])
    silent = jax.tree.map(lambda x: x, target.params)
    for part in ("attention", "source"):
        silent["layers"][1][part]["o"]["weight"] *= 0
    silent["layers"][1]["mlp"]["down"]["weight"] *= 0
    texts = texts_of(6)
    expected = our_logits(dataclasses.replace(target, params=silent), texts, 6)
    np.testing.assert_allclose(our_logits(pruned, texts, 6), expected, atol=1e-5)
    with pytest.raises(UsageError, match="has an encoder, whose MLPs cannot be cut"):
        specjax.models.narrow_mlps(target, 8)


def test_a_server_pads_all_sources_to_one_length(pair):
    """Sources of different lengths enter one row after another; each text is that of its source alone."""
    target = pair[1]
    padded = [sources([source], length=64) for source in SOURCES]
    requests = [specjax.Request([0], n, inputs=jax.tree.map(lambda x: x[0], source)) for n, source in enumerate(padded)]
    texts = {n: [] for n in range(len(SOURCES))}
    for served in specjax.serve(
        target, "prompt_lookup", requests, slots=1, longest_prompt=4, max_new_tokens=8, inputs=requests[0].inputs
    ):
        assert served.error is None
        texts[served.request] += served.tokens
    plain = specjax.decode(
        target, "autoregressive", [[0]] * len(SOURCES), key=0, inputs=sources(SOURCES), max_new_tokens=8
    )
    assert list(texts.values()) == plain.to_lists()


def test_costs_count_the_parameters_of_a_pass(pair):
    """A pass of the decoder reads neither the encoder nor the projections of the source."""
    target = pair[1]
    text = jnp.zeros((2, 1), jnp.int32)
    cache = target.model.init_cache(target.params, sources(SOURCES), 2, 8)
    of = lambda params: target.model.forward(params, text, cache, positions=text, mask=jnp.ones((2, 1, 1), bool))[0]
    jaxpr = jax.make_jaxpr(lambda params: of(params).logits)(target.params)
    closed, _ = pe.dce_jaxpr(jaxpr.jaxpr, [True])
    read = sum(var.aval.size for var in closed.invars)
    assert sum(x.size for x in jax.tree.leaves(target.pass_params)) == read


REFUSALS = {
    "bench": ["PROMPTS"], "chat": [], "explain": ["w3 w4"], "serve": [], "inspect": None,
    "train": ["--method", "eagle3", "--prompts", "PROMPTS", "--out", "OUT"], "plan": ["--topology", "v5e:1x1"],
    "compile": ["--topology", "v5e:1x1"],
}  # fmt: skip


def refusal(capsys, *arguments):
    """Return the last line of a command that ends with a wrong flag."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", REFUSALS)
def test_other_commands_name_the_model_and_a_way_out(command, tmp_path, capsys):
    folder = tmp_path / "flan"
    saved("flan", folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w3 w4"}\n')
    names = {"PROMPTS": str(tmp_path / "prompts.jsonl"), "OUT": str(tmp_path / "head")}
    flags = REFUSALS[command]
    arguments = [str(folder)] if flags is None else [*(names.get(x, x) for x in flags), "--target", str(folder)]
    error = refusal(capsys, command, *arguments)
    assert "encoder-decoder" in error and "flan" in error and "decoder-only model" in error


def test_flags_without_a_meaning_are_refused(tmp_path, capsys):
    saved("flan", tmp_path)
    error = refusal(capsys, "generate", "w3 w4", "--target", str(tmp_path), "--costs", "measured")
    assert "passes of" in error and "cannot be timed; choose other costs" in error
    error = refusal(capsys, "generate", "w3 w4", "--target", str(tmp_path), "--system", "w5")
    assert error == "specjax: --system does not apply to the source of an encoder-decoder; leave it out"


@pytest.mark.parametrize("sizes", [{"relative_attention_num_buckets": 2}, {"relative_attention_max_distance": 4}])
def test_buckets_without_a_logarithmic_part_are_refused(sizes, tmp_path):
    saved("flan", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    with pytest.raises(UsageError, match=next(iter(sizes))):
        load(tmp_path)


def test_the_command_line_reads_the_prompt_as_the_source(tmp_path, capsys):
    saved("flan", tmp_path)
    prompt = " ".join(f"w{token}" for token in SOURCES[0])
    with pytest.raises(SystemExit) as end:
        main(["generate", prompt, "--target", str(tmp_path), "--max-new-tokens", "12", "--compare", "--json"])
    document = json.loads(capsys.readouterr().out)
    target = load(tmp_path)
    plain = specjax.decode(target, "autoregressive", [[0]], key=0, inputs=sources(SOURCES[:1]), max_new_tokens=12)
    assert not end.value.code and document["identical"]
    assert document["results"][0]["token_ids"] == plain.to_lists()[0]


def test_a_difference_of_two_texts_is_explained_from_the_source(pair):
    """The second text has another second token, and the gap there is that of the logits of the source."""
    target = pair[1]
    logits = our_logits(target, texts_of(2), 2)[1, -1]
    first, best, other = texts_of(2)[1][1], int(np.argmax(logits)), int(np.argsort(logits)[-2])
    origin = TextOrigin((1, 4), batch=3, inputs=sources(SOURCES[1:]))
    difference = find_difference(target, [0], [first, other], [first, best], origin)
    assert difference.position == 1 and not difference.near_tie
    np.testing.assert_allclose(difference.top_two_gap, logits[best] - logits[other], atol=1e-3)


def test_all_programs_are_compiled_before_the_clock_starts(tmp_path, capsys, monkeypatch):
    """Sources of 20 and 40 tokens have programs of their own."""
    saved("flan", tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": " ".join(["w5"] * count)}) + "\n" for count in (20, 40)))
    flags = ["--batch-file", str(prompts), "--method", "autoregressive", "--max-new-tokens", "4", "--json"]
    compiled, warm = [], measure.warm_stream
    monkeypatch.setattr(measure, "warm_stream", lambda task, *more, **options: (
        compiled.append(task.inputs.tokens.shape), warm(task, *more, **options))[1])  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["generate", "--target", str(tmp_path / "model"), "--no-cache", *flags])
    results = json.loads(capsys.readouterr().out)["results"]
    assert not end.value.code and [result["prompt_tokens"] for result in results] == [20, 40]
    assert compiled == [(1, 32), (1, 64)]


def test_saved_and_quantised_models(tmp_path):
    """A saved model has the same parameters. In a quantised one the biases stay."""
    saved("umt5", tmp_path)
    target, tokenizer = specjax.load(str(tmp_path))
    specjax.save_model(tmp_path / "copy", target, tokenizer)
    copy, _ = specjax.load(str(tmp_path / "copy"))
    assert copy.model.config == dataclasses.replace(target.model.config, name=copy.model.config.name)
    jax.tree.map(np.testing.assert_array_equal, target.params, copy.params)
    quantized, _ = specjax.load(str(tmp_path), quantize="int8")
    texts = texts_of(6)
    ours, rounded = our_logits(target, texts, 6), our_logits(quantized, texts, 6)
    assert 0 < np.abs(ours - rounded).max() < 0.2 * np.abs(ours).max()
