"""`same_bits` is refused where it was not shown: in Python, on the command line and in plans, in one sentence."""

import jax
import pytest

import specjax
from specjax.errors import UsageError
from specjax.models import LlamaConfig, make_model
from specjax.models.loading import read_model
from specjax.numerics.same_bits import check_same_bits, unsupported_reason

CONFIG = LlamaConfig(61, 32, 1, 2, 2, 16, 40, dtype="bfloat16", same_bits=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("float32", None, "cpu", {}), 'needs dtype "bfloat16", not "float32"'),
        (("bfloat16", None, "gpu", {}), 'was not shown to hold on the backend "gpu"'),
        (("bfloat16", None, "METAL", {}), 'was not shown to hold on the backend "METAL"'),
        (("bfloat16", "int8", "tpu", {}), 'does not hold on a TPU with cache_dtype "int8"'),
        (("bfloat16", None, "cpu", {"data": 2}), 'set its axis "data" to 1'),
        (("bfloat16", None, "tpu", {"sequence": 2, "model": 2}), 'set its axis "sequence" to 1'),
    ],
)
def test_reasons(arguments, words):
    assert words in unsupported_reason(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("bfloat16", "int8", "cpu", {}),
        ("bfloat16", None, "tpu", {}),
        ("bfloat16", None, "cpu", {"model": 4, "data": 1}),
    ],
)
def test_no_reason_where_it_was_shown(arguments):
    assert unsupported_reason(*arguments) is None


@pytest.mark.parametrize("over", [None, (), ("model",)])
def test_rows_are_split_whatever_splits_the_model(over):
    mesh = specjax.mesh(data=2, model=2)
    with pytest.raises(UsageError, match='set its axis "data" to 1'):
        check_same_bits("bfloat16", None, mesh, over)
    check_same_bits("bfloat16", None, specjax.mesh(sequence=2, model=2), ("model",))


def test_models_are_refused_on_a_gpu_before_weights_are_read(monkeypatch):
    make_model(CONFIG)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    refused = 'same_bits was not shown to hold on the backend "gpu"; .*, or leave same_bits out$'
    with pytest.raises(UsageError, match=refused):
        make_model(CONFIG)
    with pytest.raises(UsageError, match=refused):
        read_model("no/such/model", dtype="bfloat16", same_bits=True)
    with pytest.raises(UsageError, match=refused):
        specjax.load_denoiser("no/such/model", dtype="bfloat16", same_bits=True)
