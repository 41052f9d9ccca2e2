"""The tiny trained hybrid model that comes with the tests: it drafts with its own module, and most drafts are right."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import quantized_files
import tiny_hybrid
from safetensors.numpy import load_file
from shipped_hybrid import FOLDER, NEW, TEXTS, plain, prompts, shipped_hybrid, shipped_module
from tiers import exhaustive
from toy_tasks.stories import story

import specjax
from specjax import trees
from specjax.catalog.defaults import NATIVE, defaults
from specjax.drafters.combined.auto import DRAFTING
from specjax.errors import CheckpointWarning
from specjax.models.heads.agreement import agreement, read_text
from specjax.models.loading.heads import load_head, read_head
from specjax.models.loading.heads.checking import check_head
from specjax.persistence import Checkpoints


def test_a_story_states_true_counts():
    rng = np.random.default_rng(3)
    for _ in range(40):
        count = None
        for sentence in story(rng).split(". "):
            if number := re.search(r"gives \w+ (\d) more", sentence):
                count += int(number[1])
            elif number := re.search(r"loses (\d) of", sentence):
                count -= int(number[1])
            elif number := re.search(r"(?:has|at the) (\d) ", sentence):
                count = count or int(number[1])
                assert count == int(number[1])
            assert 1 <= count <= 9


def test_the_files_are_small_and_their_model_is_that_of_the_benchmark():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 600_000
    target, tokenizer = specjax.load(FOLDER, dtype="bfloat16")
    assert target.native.dialect == "qwen3_5" and tokenizer.encode(TEXTS[0]) == tiny_hybrid.tokenizer().encode(TEXTS[0])
    shapes = jax.eval_shape(tiny_hybrid.untrained, 0).params
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, target.params)


def test_the_model_knows_its_stories():
    """Most tokens of a story follow from those before it."""
    ids = tiny_hybrid.texts(1, seed=99)[0].tokens
    text = read_text(shipped_hybrid(), ids, [shipped_module()])
    right = np.asarray(text.best)[:-1] == np.asarray(ids[1:])
    assert right.mean() > 0.7
    shares = agreement(shipped_hybrid(), shipped_module(), text, depths=3)
    assert min(shares) > 0.6 and shares[0] > 0.7, shares


DRAFTS = {"default": {}, "auto": {"draft_cost": DRAFTING}, "chain": {"num_tokens": 3}, "tree": {"tree": "top:4x2x1"}}


@pytest.mark.parametrize("name", ["default", "auto", "chain", exhaustive("tree")])
def test_more_than_one_and_a_half_tokens_per_pass_and_the_text_of_plain_decoding(name):
    """Prompts have unequal lengths, the shortest one token. By default drafts pause in a model so small."""
    target, options = shipped_hybrid(), DRAFTS[name]
    options = options | ({"tree": trees.parse(options["tree"])} if "tree" in options else {})
    method = "auto" if name == "auto" else "mtp"
    drafter = specjax.make_drafter(method, target, shipped_module(), **options) if options else None
    assert defaults(target, None, "cpu").head == NATIVE
    assert [len(ids) for ids in prompts()][1] == 1
    result = specjax.decode(target, drafter, prompts(), key=0, max_new_tokens=NEW)
    assert result.to_lists() == plain()
    per_pass = float(np.sum(result.lengths) / np.sum(result.stats.target_passes))
    assert (per_pass > 1.5) == (name != "default"), per_pass
    if name in ("chain", "tree"):
        assert np.sum(result.stats.accepted_by_depth, 0)[1:3].min() > 0, "later drafts are accepted too"


def test_an_open_setting_is_found_by_measurement():
    """Sources differ about the chained state of DeepSeek, which `inspect` measures. Here it is the order of inputs."""
    ids = tiny_hybrid.texts(1, seed=98)[0].tokens
    swapped = read_head(NATIVE, shipped_hybrid(), settings={"hidden_first": True})
    assert check_head(swapped, shipped_hybrid(), ids).reason is None, "the setting is not open"
    check = check_head(swapped._replace(assumed=("hidden_first",)), shipped_hybrid(), ids)
    assert "with --head-set hidden_first=no" in check.reason
    right = check_head(read_head(NATIVE, shipped_hybrid()), shipped_hybrid(), ids)
    assert min(right.depths) > max(check.depths) + 0.2


def decoded(target: specjax.Target, drafter) -> tuple[list[list[int]], float]:
    """Return the texts, and the tokens per pass over all rows."""
    result = specjax.decode(target, drafter, prompts(), key=0, max_new_tokens=NEW)
    return result.to_lists(), float(np.sum(result.lengths) / np.sum(result.stats.target_passes))


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["int8", "int4-weights"])
def test_a_quantised_model_drafts_with_its_module(scheme, tmp_path):
    """The folder is in the format compressed-tensors, and the module in it is not quantised."""
    specjax.save_model(tmp_path, specjax.load(FOLDER, quantize=scheme)[0], FOLDER)
    target = specjax.load(tmp_path)[0]
    texts, per_pass = decoded(target, specjax.make_drafter("mtp", target, load_head(NATIVE, target), num_tokens=3))
    assert texts == decoded(target, "autoregressive")[0] and per_pass > 1.5


def test_a_gguf_file_drafts_with_its_module(tmp_path):
    transformers = pytest.importorskip("transformers")
    from hybrid_gguf import write

    model = transformers.Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype="float32")
    stored = load_file(FOLDER / "model.safetensors")
    module = {name: np.asarray(x, np.float32) for name, x in stored.items() if name.startswith("mtp.")}
    target = specjax.load(write(model, tmp_path / "model.gguf", module=module))[0]
    assert target.native.dialect == "gguf" and target.model.capabilities.num_layers == 4
    ours, theirs = shipped_module().params, load_head(NATIVE, target).params
    jax.tree.map(lambda first, second: np.testing.assert_allclose(first, second, rtol=1e-6), ours, theirs)
    jax.tree.map(
        lambda first, second: np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6),
        shipped_hybrid().params, target.params,
    )  # fmt: skip
    assert defaults(target, None, "cpu").head == NATIVE
    chain = lambda target, head: decoded(target, specjax.make_drafter("mtp", target, head, num_tokens=3))
    texts, per_pass = chain(target, load_head(NATIVE, target))
    assert (texts, per_pass) == chain(shipped_hybrid(), shipped_module()) and texts == plain() and per_pass > 1.5


@pytest.mark.exhaustive
def test_served_and_resumed_texts_are_those_of_plain_decoding(tmp_path):
    requests = [specjax.Request(prompt, key=0) for prompt in prompts()]
    texts: list[list[int]] = [[] for _ in requests]
    longest = max(map(len, prompts()))
    for step in specjax.serve(
        shipped_hybrid(), None, requests, slots=2, longest_prompt=longest, max_new_tokens=NEW
    ):  # fmt: skip
        texts[step.request] += step.tokens
    assert texts == plain()
    chain = specjax.make_drafter("mtp", shipped_hybrid(), shipped_module(), num_tokens=3)
    run = lambda: specjax.stream(
        shipped_hybrid(), chain, prompts(), key=0, max_new_tokens=NEW, checkpoint=Checkpoints(tmp_path, every=2)
    )
    first = run()
    for _ in range(5):
        next(first)
    first.close()
    rows: list[list[int]] = [[] for _ in requests]
    for step in run():
        for row, tokens in zip(rows, step.tokens, strict=True):
            row += tokens
    assert rows == plain()


def test_a_quantised_module_is_read_and_not_copied(tmp_path):
    """A file in float8 with a module in float8, of which no other form is written."""
    stored = {name: np.asarray(x, np.float32) for name, x in load_file(FOLDER / "model.safetensors").items()}
    tensors, matrices = dict(stored), {}
    for name in [name for name in stored if "mlp." in name or "self_attn.q_proj" in name]:
        parts, matrices[name], settings = quantized_files.fp8(stored[name], block=(16, 16))
        del tensors[name]
        tensors |= {name.replace("weight", part): x for part, x in parts.items()}
    quantized_files.write(tmp_path / "model.safetensors", tensors)
    fields = json.loads((FOLDER / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    target = specjax.load(tmp_path, keep_quantized=False)[0]
    layer = load_head(NATIVE, target).params["stack"][0]
    up, q = matrices["mtp.layers.0.mlp.up_proj.weight"], matrices["mtp.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(layer["mlp"]["up"]["weight"], up, rtol=1e-6)
    np.testing.assert_allclose(layer["attention"]["q"]["weight"][32:], q[64:96], rtol=1e-6)
    with pytest.warns(CheckpointWarning, match="is left out, because it is quantised"):
        specjax.save_model(tmp_path / "saved", target)


@pytest.mark.exhaustive
def test_auto_mixes_the_module_with_copies():
    """Passes of equal cost: auto copies longer texts than the module drafts, and both save passes."""
    run = lambda head: specjax.decode(
        shipped_hybrid(), specjax.drafters.auto(tiny_hybrid.VOCABULARY, head=head, costs=(1.0,) * 4), prompts(), key=0,
        max_new_tokens=NEW,
    )  # fmt: skip
    both, copies = run(shipped_module()), run(None)
    passes = [int(np.sum(result.stats.target_passes)) for result in (both, copies)]
    assert both.to_lists() == copies.to_lists() == plain()
    assert passes[0] < passes[1] and np.sum(both.stats.accepted_by_depth[:, 4:]) > 0, (passes, both.stats)
