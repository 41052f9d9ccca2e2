"""`specjax generate` of diffusion models."""

import json

import pytest

import specjax
from specjax.catalog import of_kind
from specjax.models import loading

BLOCKS = {"attention": "block_causal", "block": 4}
SHORT = ("--max-new-tokens", 10)


@pytest.fixture(autouse=True)
def denoisers(monkeypatch):
    """--target full, blocks: denoisers of the tiny model; what is drafted for is `target`."""
    plain = specjax.load

    def load(source=None, **options):
        if source in ("full", "blocks"):
            raise loading.ModelKindError(f"{source} is a diffusion model")
        return plain(source, **options)

    def load_denoiser(source=None, *, block=None, mask_token=None, **options):
        if source not in ("full", "blocks"):
            raise loading.ModelKindError(f"{source} is an autoregressive model")
        if source == "full" and block is not None:
            raise specjax.UsageError("block applies to block-causal models, and full is none; leave it out")
        target, tokenizer = plain(**options)
        settings = BLOCKS | {"block": block or 4} if source == "blocks" else {}
        return specjax.Denoiser(target.model, target.params, mask_token or 0, **settings), tokenizer

    monkeypatch.setattr(specjax, "load", load, raising=False)
    monkeypatch.setattr(specjax, "load_denoiser", load_denoiser, raising=False)
    monkeypatch.setattr(loading, "is_diffusion", lambda source: source in ("full", "blocks"))


def test_json_says_in_which_order_a_text_came_to_be_and_what_it_cost(cli):
    options = ("--method", "sdar", "--set", "tau=2", "--set", "steps=2", *SHORT)
    document = json.loads(cli("generate", "hello", "--target", "blocks", *options, "--json", "--compare").out)
    (entry,) = document["results"]
    denoiser, tokenizer = specjax.load_denoiser("blocks")
    direct = specjax.denoise(
        denoiser, specjax.diffusion.methods.sdar(denoiser, tau=2, steps=2), [tokenizer.chat("hello")],
        key=specjax_keys(), max_new_tokens=10, eos=2,
    )  # fmt: skip
    count = int(direct.lengths[0])
    assert entry["token_ids"] == direct.to_lists()[0] and entry["decided_at"] == direct.decided_at[0, :count].tolist()
    assert document["target_passes"] == int(direct.stats.target_passes[0]) == entry["target_passes"]
    assert entry["columns_per_token"] == pytest.approx(float(direct.columns_per_token[0]))
    assert entry["computed_per_token"] == pytest.approx(float(direct.computed_per_token[0]))
    assert document["options"] == {"tau": 2.0, "steps": 2} and document["guarantee"] == "lossy"
    assert document["tokens_per_pass"] > document["baseline_tokens_per_pass"] and document["speedup"] > 0
    assert document["identical"] in (True, False)


def specjax_keys():
    import jax

    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jax.numpy.arange(1))


def test_a_batch_the_order_and_the_reference_on_the_screen(cli, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nabc\n")
    options = ("--batch-file", file, "--batch-size", 2, "--show", "order", "--compare", *SHORT)
    result = cli("generate", "--target", "full", *options)
    assert result.code == 0, result.err
    assert "outputs: identical to one column per pass" in result.out  # the method is one column per pass
    assert "line 2" in result.out and "pass 10: " in result.out and "columns computed per token" in result.out


@pytest.mark.parametrize(
    ("target", "method", "name"),
    [
        ("full", ("freedave", "--set", "steps=3"), "the procedure without drafts"),
        ("full", ("freedave", "--set", "by=margin", "--set", "block=4"), "the procedure without drafts"),
        ("full", ("freedave",), "one column per pass"),
        ("blocks", ("linear_spec",), "the model's autoregressive mode"),
        ("blocks", ("s2d2",), "the model's autoregressive mode"),
    ],
)
def test_a_comparison_is_with_the_text_that_is_guaranteed(target, method, name, cli):
    options = ("--target", target, "--method", *method, "--compare", *SHORT)
    result = cli("generate", "hello", *options)
    assert result.code == 0, result.err
    assert f"outputs: identical to {name}" in result.out and "differ" not in result.out
    document = json.loads(cli("generate", "hello", *options, "--json").out)
    assert document["identical"] is True and document["baseline"] == name


def test_sampled_drafts_have_a_distribution_and_no_text(cli):
    options = ("--target", "blocks", "--method", "linear_spec", "--compare", "--temperature", 1, *SHORT)
    assert (
        "outputs: not compared; sampled texts have the distribution of the model's auto"
        in cli("generate", "hello", *options).out
    )
    document = json.loads(cli("generate", "hello", *options, "--json").out)
    assert document["identical"] is None and document["baseline_tokens_per_pass"] == 1.0


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fast_dllm", "outputs: differ from one column per pass; this method is lossy"),
        ("freedave", "outputs differ: first at new token 0:"),
    ],
)
def test_another_text_is_an_error_only_where_it_was_promised(method, words, cli, monkeypatch):
    from specjax.cli.runs import denoising

    honest, plain = denoising.frames, specjax.diffusion.methods.llada

    def wrong(job):
        procedure = job.parts.procedure
        for frame in honest(job):
            yield frame if procedure == plain(job.parts.denoiser) else frame._replace(tokens=frame.tokens * 0 + 9)

    monkeypatch.setattr(denoising, "frames", wrong)
    out = cli("generate", "hello", "--target", "full", "--method", method, "--compare", *SHORT).out
    assert words in out and "one column per pass" in out


def test_a_diffusion_model_drafts_for_an_autoregressive_one(cli):
    """At temperature 0 the text is that of plain decoding, which --compare checks."""
    run = ("generate", "hello", *SHORT, "--draft", "blocks", "--block", 4, "--method", "deer", "--compare", "--json")
    document = json.loads(cli(*run, "--num-draft-tokens", 3).out)
    assert document["identical"] and document["drafted"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "blocks", "--set", "block=8"), "block=8 differs from the model's blocks of 4 columns"),
        (
            ("--target", "full", "--method", "fast_dllm", "--set", "factor=1"),
            "factor has no effect with rule=threshold; leave factor out, or set rule=factor",
        ),
        (
            ("--target", "full", "--method", "auto"),
            "--method auto is a drafter for autoregressive models, and --target",
        ),
        (("--target", "full", "--method", "pearl"), "--method pearl is a decoder for autoregressive models"),
        (("--target", "full", "--method", "none"), 'unknown method "none"; for a diffusion model choose adablock, ccd'),
        (("--method", "llada"), "SmolLM2-135M-Instruct is an autoregressive model, but --method is for diffusion"),
        (("--show", "order"), "--show order draws the canvas of a diffusion model, and this target is not one"),
        (("--target", "full", "--show", "all"), "--show must be text or order"),
        (("--target", "full", "--method", "sdar"), "sdar needs a block-causal model"),
        (
            ("--target", "full", "--draft", "draft"),
            "--draft applies to autoregressive models, and this is a diffusion model; remove it",
        ),
        (("--target", "full", "--verifier", "typical"), "--verifier applies to autoregressive models"),
        (("--target", "full", "--adapt", "calm"), "--adapt applies to autoregressive models"),
        (("--target", "full", "--method", "constraint"), "the command line cannot load the inputs of constraint"),
        (("--target", "full", "--set", "tau=1"), 'method llada has no option "tau"'),
        (("--target", "full", "--set", "steps=some"), "--set steps"),
        (("--target", "full", "--block", 4), "--block applies to block-causal models"),
        (("--target", "target", "--block", 4), "--block applies to diffusion models"),
        (("--mask-token", 4), "--mask-token applies to diffusion models"),
        (("--draft", "full"), "use these as --target, or draft with them by --method deer, diffuspec or failfast"),
        (("--method", "deer"), "method deer drafts with a diffusion model; add --draft MODEL"),
        (("--method", "deer", "--draft", "draft"), "--draft: draft is an autoregressive model, but --method drafts"),
        (("--method", "deer", "--draft", "full", "--block", 4), "--block applies to block-causal models"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments, words, refused):
    assert words in refused("generate", "hello", *arguments)


def test_block_and_mask_of_the_command_line_reach_the_model(cli, monkeypatch):
    plain, passed = specjax.load_denoiser, {}

    def load_denoiser(source, **options):
        passed.update(options)
        return plain(source, **options)

    monkeypatch.setattr(specjax, "load_denoiser", load_denoiser)
    flags = ("--target", "blocks", "--method", "sdar", "--block", 2, "--mask-token", 3, "--max-new-tokens", 4)
    assert cli("generate", "hello", *flags).code == 0
    assert (passed["block"], passed["mask_token"]) == (2, 3)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["hello"], "category": "qa"}\n{"turns": ["abc"], "category": "coding"}\n')
    return file


def test_bench_counts_columns_beside_passes(cli, prompts, tmp_path):
    methods = ("--method", "fast_dllm", "--method", "freedave", "--set", "fast_dllm.tau=0", "--set", "freedave.steps=5")
    sizes = ("--set", "fast_dllm.block=10", "--set", "freedave.block=10", "--repeats", 1, "--out", tmp_path / "b.json")
    result = cli("bench", prompts, "--target", "full", *methods, *sizes, *SHORT, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    fast, ahead = (document["overall"][name] for name in ("fast_dllm", "freedave"))
    assert fast["tokens"] == 20 and fast["tokens_per_pass"] == 10.0 and fast["baseline_tokens_per_pass"] == 1.0
    tokenizer = specjax.load_denoiser("full")[1]
    columns = sum(len(tokenizer.chat(text)) + 10 for text in ("hello", "abc"))  # columns of the two canvases
    assert fast["columns_per_token"] == columns / 20 and fast["baseline_columns_per_token"] == 10 * columns / 20
    assert fast["speedup"] == pytest.approx(fast["tokens_per_second"] / fast["baseline_tokens_per_second"])
    assert fast["guarantee"] == "lossy" and 0 <= fast["agreement"] <= 1 and not fast["refused"]
    assert ahead["guarantee"] == "identical" and ahead["identical"] is True
    assert fast["computed_per_token"] > fast["columns_per_token"]  # a prompt is padded to a compiled size
    assert fast["baseline_computed_per_token"] == 10 * fast["computed_per_token"]
    # Its text is that of `llada` with two columns a pass, not with one; four canvases are four times the columns.
    assert not ahead["refused"] and document["differences"] == [] and ahead["tokens_per_pass"] >= 2.0
    assert ahead["columns_per_token"] == pytest.approx(4 * columns / 2 / ahead["tokens_per_pass"], rel=0.2)
    runs = document["prompts"][0]["runs"]
    assert set(runs) == {"fast_dllm", "freedave", "one column per pass, blocks of 10"}
    assert sum(entry["runs"]["fast_dllm"]["columns"] for entry in document["prompts"]) == columns
    assert len(document["tasks"]) == 2 and (tmp_path / "b.png").exists()


def test_bench_compares_a_verified_method_with_the_autoregressive_mode(cli, prompts, tmp_path, monkeypatch):
    from specjax.bench import measure

    honest, blocks = measure.run_decode, []

    def counted(task):
        blocks.append(task.target.block)
        return honest(task)

    monkeypatch.setattr(measure, "run_decode", counted)
    options = ("--target", "blocks", "--method", "linear_spec", "--limit", 1, "--repeats", 1)
    result = cli("bench", prompts, *options, "--out", tmp_path / "b.json", *SHORT, "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    entry = document["overall"]["linear_spec"]
    assert entry["guarantee"] == "distribution" and entry["identical"] is True and document["differences"] == []
    assert set(blocks) == {1, 4}


def test_bench_runs_a_grid_of_options(cli, prompts, tmp_path):
    """A threshold that nothing reaches is one column per pass, one that all reach is a block a pass."""
    grid = ("--method", "fast_dllm", "--grid", "tau=2,0", "--grid", "block=5,10", "--set", "rule=threshold")
    result = cli(
        "bench", prompts, "--limit", 1, "--target", "full", *grid, "--repeats", 1, "--out", tmp_path / "b.json", *SHORT,
        "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    overall = json.loads(result.out)["overall"]
    rates = {name: entry["tokens_per_pass"] for name, entry in overall.items()}
    assert rates == {
        "fast_dllm tau=2, block=5": 1.0, "fast_dllm tau=2, block=10": 1.0,
        "fast_dllm tau=0, block=5": 5.0, "fast_dllm tau=0, block=10": 10.0,
    }  # fmt: skip
    assert {entry["method"] for entry in overall.values()} == {"fast_dllm"}
    assert overall["fast_dllm tau=0, block=5"]["options"] == {"rule": "threshold", "tau": 0.0, "block": 5}
    cost = {name: entry["columns_per_token"] * rates[name] for name, entry in overall.items()}
    assert len(set(cost.values())) == 1, "a pass reads the canvas"
    assert all(overall[name]["agreement"] == 1 for name in rates if "tau=2" in name)


def test_bench_refuses_the_speed_of_another_text_than_was_promised(cli, prompts, tmp_path, monkeypatch):
    from specjax.bench import measure

    honest = measure.run_decode

    def wrong(task):
        run = honest(task)
        return run if task.drafter.verify is None else run._replace(tokens=[[*row[:-1], 9] for row in run.tokens])

    monkeypatch.setattr(measure, "run_decode", wrong)
    options = ("--method", "freedave", "--repeats", 1, "--out", tmp_path / "b.json", *SHORT)
    result = cli("bench", prompts, "--target", "full", *options)
    assert result.code == 1 and "refused" in result.out and "columns" not in result.err
    assert "freedave differs from the procedure that it accelerates on line 1 (qa), first at new token 9" in result.err
    assert "col/tok" in result.out and "no speed is reported for freedave" in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "prompt_lookup"), "--method prompt_lookup is a drafter for autoregressive models"),
        (("--verifier", "typical"), "--verifier applies to autoregressive models"),
        (("--method", "constraint"), "the command line cannot load the inputs of constraint; call specjax.diffusion"),
        (("--set", "steps=2"), 'method fast_dllm has no option "steps"'),
        (("--target", "blocks", "--grid", "block=4,8"), "block=8 differs from the model's blocks of 4 columns"),
        (("--grid", "rule=threshold,factor", "--grid", "tau=0.5,0.9"), "tau has no effect with rule=factor"),
        (("--grid", "steps=2,3"), '--grid steps=2,3: method fast_dllm has no option "steps"'),
        (("--grid", "tau=0.5,,1"), "--grid tau"),
        (("--grid", "tau=0.5,1", "--set", "tau=1"), "--grid tau=0.5,1: --set sets tau already"),
        (("--grid", "tau=1", "--grid", "tau=2"), "--grid tau=2: --grid sets tau already"),
    ],
)
def test_what_does_not_fit_a_bench_is_one_sentence(arguments, words, prompts, refused):
    assert words in refused("bench", prompts, "--target", "full", *arguments)


def test_methods_lists_the_kind(cli):
    out = cli("methods").out
    assert "for diffusion models" in out and all(name in out for name in of_kind("diffusion"))
    assert "specjax generate PROMPT --method sdar --target MODEL" in cli("methods", "sdar").out


def test_a_canvas_fills_up():
    import numpy as np

    from specjax.cli.runs.denoising import canvas
    from specjax.diffusion.frames import Frame

    tokens, opened = np.array([[9, 100, 0, 101]]), np.array([[False, False, True, False]])
    one = np.array([1])
    frame = Frame(tokens, opened, np.array([[-2, 0, -1, 1]]), one, one * 4, one * 2, one * 2, one, one, one, one, one)
    shown = canvas(frame, 0, specjax.load()[1])
    assert shown.plain == "a▁b" and [str(span.style) for span in shown.spans] == ["dim", "bold green"]
