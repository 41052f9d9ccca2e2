"""A tiny model with a byte-level vocabulary in place of real weights, and the command line as a function."""

from __future__ import annotations

import copy
import dataclasses
import json
import types

import jax
import numpy as np
import pytest

import specjax
from specjax.cli import main
from specjax.models import LlamaConfig, init_params, loading, make_model
from specjax.models.storage import quantize_params, quantized_config


class ByteTokenizer:
    """Byte b is id b + 3; id 2 ends a text; ids 0 and 1 are never text."""

    eos = (2,)
    template_args: dict = {}  # noqa: RUF012, replaced in copies only

    def __init__(self, vocab_size: int = 259, odd: int | None = None):
        self.vocab = tuple(f"<{i}>" if i != odd else "<odd>" for i in range(vocab_size))

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [b + 3 for b in text.encode()]

    def chat(self, text: str | list[dict[str, str]]) -> list[int]:
        messages = [{"content": text}] if isinstance(text, str) else text
        suffix = self.encode(self.template_args.get("suffix", ""))
        return [1, *(id for message in messages for id in [*self.encode(message["content"]), *suffix, 1])]

    def with_template_args(self, variables: dict):
        """The template reads `suffix`, a text after each message."""
        if variables.keys() - {"suffix"}:
            raise specjax.UsageError(f"the model's chat template reads no variable {min(variables)}")
        tokenizer = copy.copy(self)
        tokenizer.template_args = variables
        return tokenizer

    def decode(self, ids) -> str:
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors="replace")


CONFIG = LlamaConfig(
    vocab_size=259, width=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=32, max_positions=512,
    name="tiny",
)  # fmt: skip


def make_target(config: LlamaConfig = CONFIG, seed: int = 0) -> specjax.Target:
    # Large weights: greedy text of a random model then depends on its past, without near-ties.
    params = jax.tree.map(lambda x: 4 * x, init_params(config, jax.random.key(seed)))
    return specjax.Target(make_model(config), params)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """`specjax.load` gives tiny models: "draft" another one, "odd" one with another vocabulary."""
    monkeypatch.setenv("SPECJAX_NO_CACHE", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def load(
        source=None, *, dtype="float32", stacked=None, cache_dtype=None, same_bits=False, max_positions=None, mesh=None,
        over=None, quantize=None, keep_quantized=None,
    ):  # fmt: skip
        assert dtype in ("float32", "bfloat16") and (over is None or mesh is not None)
        if not 1 <= (max_positions or 1) <= CONFIG.max_positions:
            raise specjax.UsageError(f"max_positions must be from 1 to 512, the limit of tiny, not {max_positions}")
        config = dataclasses.replace(
            CONFIG, cache_dtype=cache_dtype, dtype=dtype if same_bits else CONFIG.dtype, same_bits=same_bits,
            max_positions=max_positions or CONFIG.max_positions,
        )  # fmt: skip
        if source in (None, "target", "draft", "odd"):
            target = make_target(config, seed=int(source == "draft"))
            if quantize is not None:
                config = quantized_config(config, quantize, "cpu")
                target = specjax.Target(make_model(config), quantize_params(target.params, config))
            spread = target if mesh is None else specjax.shard(target, mesh, over)
            return spread, ByteTokenizer(odd=7) if source == "odd" else ByteTokenizer()
        raise specjax.UsageError(f'there is no file or folder "{source}"')

    monkeypatch.setattr(specjax, "load", load, raising=False)
    monkeypatch.setattr(loading, "load_tokenizer", lambda source=None: load(source)[1])


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory):
    """A tiny reward model in the format of transformers, with the ids of `ByteTokenizer`."""
    tokenizers = pytest.importorskip("tokenizers")
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("reward")
    specjax.save_model(folder, make_target(seed=3))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    score = np.random.default_rng(0).normal(size=(1, CONFIG.width)).astype(np.float32)
    save_file(tensors | {"score.weight": score}, folder / "model.safetensors")
    words = {f"<{i}>": i for i in range(CONFIG.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<0>"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def cli(capsys):
    """`cli(*arguments)` gives .code, .out and .err."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return types.SimpleNamespace(code=stop.value.code, out=captured.out, err=captured.err)

    return run


@pytest.fixture
def refused(cli):
    """Like `cli`, for bad input: exit code 2, one line, no traceback; returns the line."""

    def run(*arguments) -> str:
        result = cli(*arguments)
        assert result.code == 2, result
        assert "Traceback" not in result.err + result.out
        lines = [line for line in result.err.splitlines() if line.startswith("specjax: ")]
        assert len(lines) == 1, result.err
        return lines[0]

    return run
