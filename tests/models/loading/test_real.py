"""Real weights against transformers reading the same GGUF, over 200 tokens."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import load
from specjax.models.loading import resolve

TOLERANCE = 2e-3

TEXT = """Speculative decoding drafts several tokens with a small model and checks them with a large one in a
single pass. What the large model would have said itself is kept; the first token that differs is replaced,
and the rest thrown away. The text is therefore exactly that of the large model, only sooner. How much sooner
depends on how often the draft is right, on how cheap it is, and on how much of the hardware a single token
leaves idle.

def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

The quick brown fox jumps over the lazy dog, 1234567890 times, while the café's naïve waiter counts: one, two, three. In
the beginning there was a list of numbers, and nobody knew what they meant until somebody wrote down the question.
They are still waiting for the answer to it."""


@functools.cache
def logits_of(source, dtype="float32"):
    """Compute (ids [200], logits [200, V]) of TEXT in one pass."""
    target, tokenizer = load(source, dtype=dtype, stacked=True)  # compiles in a third of the time
    ids = jnp.array([tokenizer.encode(TEXT)[:200]])
    assert ids.shape == (1, 200)
    model = target.model
    mask = jnp.tril(jnp.ones((1, 200, 200), bool))

    @jax.jit
    def run(params, ids):
        cache = model.init_cache(params, None, 1, 8)
        return model.forward(params, ids, cache, positions=jnp.arange(200)[None], mask=mask)[0].logits

    return ids, np.asarray(run(target.params, ids)[0])


def reference_logits(file, ids):
    """Compute logits with transformers and its own reading of the file (config, names, permutations, dequantisation).

    `from_pretrained(gguf_file=...)` would also need the package accelerate.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=empty)["tensors"]
    kind = type(empty)
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor(np.asarray(ids), dtype=torch.long)).logits[0].numpy()


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_logits_equal_transformers():
    ids, ours = logits_of(None)
    theirs = reference_logits(resolve(None), ids)
    worst = np.max(np.abs(ours - theirs))
    print(f"SmolLM2: max |difference of logits| {worst:.2e}, of {np.std(theirs):.1f} standard deviation")
    assert worst <= TOLERANCE


@pytest.mark.real
@pytest.mark.slow
def test_gemma_logits_equal_transformers(weights):
    file = weights("gemma-3-270m-q4_k_m.gguf")
    ids, ours = logits_of(file)
    theirs = reference_logits(file, ids)
    worst = np.max(np.abs(ours - theirs))
    print(f"Gemma 3 270M: max |difference of logits| {worst:.2e}, of {np.std(theirs):.1f} standard deviation")
    assert worst <= TOLERANCE


def mean_log_likelihood(source) -> float:
    """Compute that of the tokens of TEXT. It collapses if biases, rotary layout or any weight is wrong."""
    ids, logits = logits_of(source)
    mean = float(jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), ids[0, 1:, None], -1)))
    print(f"{source}: mean log likelihood {mean:.2f}")
    return mean


@pytest.mark.real
def test_smollm2_predicts_english():
    assert mean_log_likelihood(None) > -3.6


@pytest.mark.real
@pytest.mark.slow
def test_qwen_predicts_english(weights):
    assert mean_log_likelihood(weights("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf")) > -3.6


@pytest.mark.real
def test_gemma_loads_within_memory_and_time(weights):
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the peak from /proc: getrusage counts the parent's memory too")
    code = """
import re, sys, time
from specjax.models import load
start = time.perf_counter()
load(sys.argv[1])
print(time.perf_counter() - start, re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""
    command = [sys.executable, "-c", code, str(weights("gemma-3-270m-q4_k_m.gguf"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    print(f"Gemma 3 270M: loaded in {seconds:.1f} s, peak {peak / 2**20:.2f} GiB")
    assert peak * 1024 < 1.8 * 2**30
    assert seconds < 20
