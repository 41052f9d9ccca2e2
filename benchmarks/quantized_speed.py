"""Decoding with int8 weights on a CPU, beside float32, `transformers` in float32 and llama.cpp with Q8_0.

    python benchmarks/quantized_speed.py
    python benchmarks/quantized_speed.py --models int8-bfloat16 int8-same-bits  # the cost of same_bits
    python benchmarks/quantized_speed.py --target qwen2.5-coder-0.5b.gguf --methods autoregressive --repeats 3

One process, all sides in turn, medians of runs of 48 tokens. The prompt asks for a text that repeats parts of itself,
so `auto` has drafts. A side whose library is not installed is skipped and named. llama.cpp reads a copy of the file of
the target that its own tool rounds to Q8_0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import specjax
from specjax.models.loading import resolve
from specjax.models.storage import num_bytes

PROMPT = (
    "Fix the spelling and print the whole text: The quick brwon fox jumps over the lazy dog. It then runs into the "
    "forrest, where it meets a wise old owl. The owl asks the fox why it is in such a hury."
)
MODELS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantize": "int8"},
    "int8-bfloat16": {"dtype": "bfloat16", "quantize": "int8"},
    "int8-same-bits": {"dtype": "bfloat16", "quantize": "int8", "same_bits": True},
    "int8-weights": {"dtype": "float32", "quantize": "int8-weights"},
    "int4-weights": {"dtype": "float32", "quantize": "int4-weights"},
}
METHODS = ("autoregressive", "auto")
PEERS = {"transformers": ("torch", "transformers"), "llama.cpp": ("llama_cpp",)}
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
THREADS = 2
WIDTHS = (1, 8)
"""Tokens of the passes of `auto`. Each is compiled, and products of int8 numbers have 8 rows in any case."""

Run = Callable[[], list[int]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a GGUF file; default: SmolLM2")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["float32", "int8"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def run_ours(target: specjax.Target, method: str, prompt: list[int], count: int) -> Run:
    options = {"widths": WIDTHS} if method == "auto" else {}
    drafter = specjax.make_drafter(method, target, **options)

    def run() -> list[int]:
        result = specjax.decode(target, drafter, [prompt], key=jax.random.key(0), max_new_tokens=count)
        return result.to_lists()[0]

    return run


def run_transformers(file: Path, prompt: list[int], count: int) -> Run:
    """Return a run of `transformers` with the weights of the file, expanded to float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory() as folder:
        specjax.save_model(folder, specjax.load(file, dtype="float32", keep_quantized=False)[0])
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run() -> list[int]:
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
                eos_token_id=None,
            )  # fmt: skip
        return output[0, len(prompt) :].tolist()

    return run


def run_llama_cpp(file: Path, prompt: list[int], count: int) -> Run:
    """Return a run of llama.cpp, which reads a copy of the file in Q8_0.

    Its kernels for AMX crash for SmolLM2 (llama-cpp-python 0.3.36), so it uses those for AVX-512 VNNI.
    """
    import llama_cpp

    library = llama_cpp.llama_cpp
    default_params = library.llama_model_default_params

    def without_amx() -> Any:
        params = default_params()
        params.use_extra_bufts = False
        return params

    library.llama_model_default_params = without_amx
    copy = Path(tempfile.mkdtemp()) / "q8_0.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize, parameters.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True, THREADS
    if llama_cpp.llama_model_quantize(str(file).encode(), str(copy).encode(), parameters):
        raise SystemExit(f"llama.cpp cannot round {file} to Q8_0")
    model = llama_cpp.Llama(str(copy), n_ctx=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)
    copy.unlink()  # its pages stay mapped

    def run() -> list[int]:
        model.reset()
        stream = model.generate(prompt, temp=0.0, repeat_penalty=1.0)
        return [next(stream) for _ in range(count)]

    return run


def instructions() -> list[str]:
    """Return the instruction sets of this CPU that matter for products."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().partition("flags")[2].partition("\n")[0].split() if info.exists() else []
    return [name for name in INSTRUCTIONS if name in flags]


def make_runs(options: argparse.Namespace, file: Path, targets: dict[str, specjax.Target], prompt: list[int]):
    """Return the runs of all sides, by name, and the peers that are not installed."""
    missing = [name for name in options.peers if not all(map(importlib.util.find_spec, PEERS[name]))]
    runs = {
        f"{name}, {method}": run_ours(target, method, prompt, options.tokens)
        for name, target in targets.items()
        for method in options.methods
    }
    for name, make in (("transformers", run_transformers), ("llama.cpp", run_llama_cpp)):
        if name in options.peers and name not in missing:
            runs[name] = make(file, prompt, options.tokens)
    return runs, missing


def main() -> None:
    options, start = parse(), time.perf_counter()
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # threads of llama.cpp and torch that wait otherwise take a core
    file = resolve(options.target)
    targets, prompt = {}, []
    for name in options.models:
        targets[name], tokenizer = specjax.load(file, **MODELS[name])
        prompt = tokenizer.chat(PROMPT)
    runs, missing = make_runs(options, file, targets, prompt)
    texts, times = {}, {name: [] for name in runs}
    for name, run in runs.items():  # compile and warm
        texts[name] = run()
        print(f"{name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    for _ in range(options.repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    rates = {name: options.tokens / statistics.median(values) for name, values in times.items()}
    first = next(iter(rates))
    report = {
        "target": file.name,
        "instructions": instructions(),
        "not installed": missing,
        "seconds": time.perf_counter() - start,
        "megabytes": {name: num_bytes(target.params) / 1e6 for name, target in targets.items()},
        "tokens_per_second": rates,
        f"in {first}": {name: rate / rates[first] for name, rate in rates.items()},
        "auto equals plain": {
            name: texts[f"{name}, auto"] == texts[f"{name}, autoregressive"]
            for name in targets
            if {"auto", "autoregressive"} <= set(options.methods)
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
