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
        (["--method", "calm"], "use --adapt calm, or --method thinned --set depth=calm"),
        (["--method", "thinned", "--set", "depth=first"], 'depth: "first" lacks routers, file of trained routers'),
    ],
)
def test_what_does_not_fit(refused, arguments, words):
    assert words in refused("generate", "hello", *arguments, *SHORT)
