"""specjax: speculative and parallel decoding in JAX.

target, tokenizer = specjax.load()
result = specjax.decode(target, specjax.drafters.prompt_lookup(), [tokenizer.chat("Hello")], key=key, max_new_tokens=64)
print(tokenizer.decode(result.to_lists()[0]))
"""

import importlib
import importlib.util

# JAX takes seconds to import, and `specjax --help` needs none of it: a name is imported when it is first asked for.
# __init__.pyi says the same to type checkers.
_HOMES = {
    "METHODS": "catalog.methods",
    "VERIFIERS": "verifiers",
    "Capabilities": "types",
    "Controller": "types",
    "DecodeResult": "engine.results",
    "Denoiser": "diffusion.types",
    "Detokenizer": "engine.text",
    "Drafter": "types",
    "Kept": "engine.kept",
    "Model": "types",
    "Output": "types",
    "Processor": "types",
    "Request": "engine.requests",
    "Served": "engine.serve",
    "Settings": "engine.prepare",
    "StreamStep": "engine.results",
    "Target": "types",
    "TokenTree": "types",
    "UsageError": "errors",
    "Verdict": "types",
    "Verifier": "verifiers",
    "__version__": "version",
    "arrivals": "engine.requests",
    "check_bits": "analysis.same_bits",
    "check_model": "analysis.model_promises",
    "compile_report": "planning",
    "decode": "facade",
    "denoise": "facade",
    "explain": "analysis.rounds",
    "load": "facade",
    "load_head": "models.loading.heads",
    "make_drafter": "catalog.methods",
    "mesh": "parallel",
    "plan": "planning",
    "save_head": "models.loading.heads",
    "save_model": "models.loading.writing",
    "serve": "facade",
    "shard": "parallel",
    "shard_head": "parallel",
    "stream": "facade",
    "target_of": "models.own",
}

__all__ = [
    *_HOMES,
    "adaptive",
    "collaborate",
    "controllers",
    "decoders",
    "diffusion",
    "drafters",
    "processors",
    "trees",
    "verifiers",
]


def __getattr__(name: str):
    if name in _HOMES:
        value = getattr(importlib.import_module(f"specjax.{_HOMES[name]}"), name)
    elif importlib.util.find_spec(f"specjax.{name}"):
        value = importlib.import_module(f"specjax.{name}")
    else:
        raise AttributeError(f"module 'specjax' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
