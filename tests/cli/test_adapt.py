"""`specjax generate --adapt`: a target that does less."""

import json

import jax
import pytest
from toy import tiny_llama

import specjax
from specjax import adaptive
from specjax.bench import measure

SHORT = ("--max-new-tokens", 16)


@pytest.fixture(autouse=True)
def six_layers(monkeypatch):
    plain = specjax.load
    model = tiny_llama(layers=6, vocab=259, stacked=True)
    monkeypatch.setattr(specjax, "load", lambda *args, **options: (model, plain(*args, **options)[1]), raising=False)
    return model


def test_the_text_is_that_of_the_thinned_target(cli, six_layers):
    result = cli("generate", "hello", "--adapt", "skip_decode:1.5", *SHORT, "--json", "--compare")
    document = json.loads(result.out)
    assert "lossy: skip_decode skips layers of llama, per token" in " ".join(result.err.split())
    assert document["adapt"] == "skip_decode:1.5" and document["target"] == "llama by skip_decode"
    assert document["method"] == "autoregressive" and document["identical"]
    assert document["guarantee"] == "lossy" and document["guarantee_to_adapted_target"] == "distribution"
    prompts = [specjax.load()[1].chat("hello")]
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 16, "eos": 2}
    # The horizon is what is to be written.
    thinned = adaptive.skip_layers(six_layers, adaptive.skip_decode(1.5, horizon=16))
    ours = document["results"][0]["token_ids"]
    assert ours == specjax.decode(thinned, "autoregressive", prompts, **options).to_lists()[0]
    assert ours != specjax.decode(six_layers, "autoregressive", prompts, **options).to_lists()[0]


def test_as_a_drafter_it_is_lossless(cli):
    document = json.loads(
        cli("generate", "hello", "--method", "thinned", "--set", "depth=ffn_skip:0.5,warm_up=0", *SHORT, "--json",
            "--compare").out
    )  # fmt: skip
    assert document["identical"] and document["adapt"] is None and document["guarantee"] == "distribution"


@pytest.mark.parametrize("name", ["dynamax:probes", "first:routers"])
def test_trained_arrays_are_read_from_a_file(cli, refused, six_layers, tmp_path, name):
    """The text is that of Python, and arrays for another model are refused."""
    method, noun = name.split(":")
    kind = adaptive.Probes if noun == "probes" else adaptive.Routers
    arrays = [0.5 * jax.random.normal(jax.random.key(1), shape) for shape in ((6, six_layers.model.config.width), (6,))]
    save = getattr(adaptive, f"save_{noun}")
    save(tmp_path / "arrays.safetensors", kind(*arrays))
    save(tmp_path / "other.safetensors", kind(*(x[:5] for x in arrays)))
    more = ",threshold=0.6,every=1" if method == "dynamax" else ""
    spec = f"{method}:{noun}={tmp_path / 'arrays.safetensors'}{more}"
    document = json.loads(cli("generate", "hello", "--adapt", spec, *SHORT, "--json").out)
    options = {"threshold": 0.6, "every": 1} if more else {}
    thinned = adaptive.skip_layers(six_layers, getattr(adaptive, method)(kind(*arrays), **options))
    settings = {"key": measure.row_keys(0, [0]), "max_new_tokens": 16, "eos": 2}
    prompts = [specjax.load()[1].chat("hello")]
    ours = document["results"][0]["token_ids"]
    assert ours == specjax.decode(thinned, "autoregressive", prompts, **settings).to_lists()[0]
    assert ours != specjax.decode(six_layers, "autoregressive", prompts, **settings).to_lists()[0]
    words = refused("generate", "hello", "--adapt", f"{method}:{tmp_path / 'other.safetensors'}", *SHORT)
    assert f"--adapt: the {noun} fit 5 layers, but the model has 6" in words
    assert f"{method}:{noun}=FILE" in cli("methods", method).out


@pytest.mark.parametrize("arguments", [
    ("--method", "thinned", "--set", "depth=matformer:.25/.5/1"),
    ("--method", "two_model", "--draft", "draft", "--set", "depth=s2d:0.3"),
])  # fmt: skip
def test_a_part_drafts_for_the_whole(cli, arguments):
    """Mix'n'Match drafts over the target's cache, and a draft model has exits."""
    document = json.loads(cli("generate", "hello", *arguments, *SHORT, "--json", "--compare").out)
    assert document["identical"] and document["guarantee"] == "distribution"


def test_a_width_per_layer(cli, six_layers):
    document = json.loads(cli("generate", "hello", "--adapt", "matformer:.25/.5/1", *SHORT, "--json").out)
    part = adaptive.skip_layers(six_layers, adaptive.matformer((0.25, 0.5, 1.0)))
    assert part.model.config.mlp_widths == (16, 16, 32, 32, 64, 64)
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 16, "eos": 2}
    prompts = [specjax.load()[1].chat("hello")]
    ours = specjax.decode(part, "autoregressive", prompts, **options).to_lists()[0]
    assert document["results"][0]["token_ids"] == ours and document["guarantee"] == "lossy"


def test_corrections_are_read_from_a_file(cli, refused, six_layers, tmp_path):
    """The target's stacked layers are separated, and a limit above the prompt does not change the text."""
    file, other = tmp_path / "corrections.safetensors", tmp_path / "other.safetensors"
    blank = adaptive.blank_corrections(six_layers, jax.random.key(1), rank=2)
    corrections = blank.replace(up=jax.random.normal(jax.random.key(2), blank.up.shape) * 0.1)
    adaptive.save_corrections(file, corrections)
    adaptive.save_corrections(other, jax.tree.map(lambda x: x[:5], corrections))
    spec = f"lora_drop:corrections={file},every=2,alpha=4"
    documents = [
        json.loads(cli("generate", "hello", "--adapt", spec + more, *SHORT, "--json").out)
        for more in ("", ",longest_prompt=64")
    ]
    thinned = adaptive.skip_layers(six_layers, adaptive.lora_drop(corrections, every=2, alpha=4))
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 16, "eos": 2}
    ours = specjax.decode(thinned, "autoregressive", [specjax.load()[1].chat("hello")], **options).to_lists()[0]
    for document in documents:
        assert document["results"][0]["token_ids"] == ours and document["target"] == "llama by lora_drop"
    assert "lora_drop:corrections=FILE" in cli("methods", "lora_drop").out
    for spec, words in (
        ("lora_drop", '--adapt: "lora_drop" lacks corrections, file of trained corrections; write lora_drop:FILE'),
        (f"lora_drop:{other}", "--adapt: the corrections fit 5 layers, but the model has 6"),
        (f"lora_drop:{tmp_path / 'none.safetensors'}", "of corrections of layers; `specjax train` writes it"),
        (f"lora_drop:{file},every=0", "--adapt: every must be at least 1, not 0"),
    ):
        assert words in refused("generate", "hello", "--adapt", spec, *SHORT)


def test_the_table_says_that_it_is_lossy(cli):
    out = " ".join(cli("generate", "hello", "--adapt", "unified:1.5", *SHORT).out.replace("│", " ").split())
    assert "(guarantee: lossy; distribution relative to the target with unified:1.5)" in out


@pytest.mark.parametrize("name", ["calm:0.5", "skip_decode", "ffn_skip", "unified"])
def test_a_temperature_is_obeyed_and_recorded(cli, six_layers, name):
    document = json.loads(cli("generate", "hello", "--adapt", name, "--temperature", 0.7, *SHORT, "--json").out)
    assert document["settings"]["temperature"] == 0.7 and document["guarantee"] == "lossy"
    thinned = adaptive.skip_layers(six_layers, adaptive.parsing.parse_depth(name, 16))
    options = {"key": measure.row_keys(0, [0]), "max_new_tokens": 16, "eos": 2, "temperature": 0.7}
    wanted = specjax.decode(thinned, "autoregressive", [specjax.load()[1].chat("hello")], **options)
    assert document["results"][0]["token_ids"] == wanted.to_lists()[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--adapt", "dynamax"], '--adapt: "dynamax" lacks probes, file of trained probes; write dynamax:FILE'),
        (["--adapt", "auto"], '--adapt: "auto" is not a method of adaptive depth'),
        (["--adapt", "calm:every=6"], "--adapt: every must be below the number of layers of the model, 6, not 6"),
        (["--adapt", "calm:depth=3"], "--adapt: "),
        (["--adapt", "matformer:.5/x"], "share must be a number, or several joined by / such as .25/.5/1, not"),
        (["--adapt", "matformer:.5/2"], "--adapt: share must be above 0 and at most 1, not 2.0"),
        (["--adapt", "matformer:" + "/".join(["1"] * 7)], "share has 7 numbers, more than the 6 layers of the model"),
        (
            ["--method", "two_model", "--draft", "draft", "--set", "depth=s2d:exits=7"],
            "--set depth: exits must be from 1 to the 6 layers of the model, not 7",
        ),
        (["--method", "calm"], "use --adapt calm, or --method thinned --set depth=calm"),
        (["--method", "thinned", "--set", "depth=first"], 'depth: "first" lacks routers, file of trained routers'),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", "hello", *arguments, *SHORT)
