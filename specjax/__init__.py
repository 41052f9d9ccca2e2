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
    "Cancel": "serving.requests",
    "Capabilities": "types",
    "Controller": "types",
    "DecodeResult": "engine.results",
    "Denoiser": "diffusion.types",
    "Detokenizer": "serving.detokenizer",
    "Drafter": "types",
    "Hooks": "types",
    "Model": "types",
    "Output": "types",
    "Processor": "types",
    "ProgramCache": "persistence.program_cache",
    "Request": "serving.requests",
    "Served": "serving.batch",
    "Settings": "engine.prepare",
    "StreamStep": "engine.results",
    "Target": "types",
    "TokenTree": "types",
    "Traits": "types",
    "TreeSize": "types",
    "UsageError": "errors",
    "Verdict": "types",
    "Verifier": "verifiers",
    "__version__": "version",
    "arrivals": "serving.requests",
    "check_bits": "analysis.check_bits",
    "check_model": "analysis.check_model",
    "compile_report": "planning",
    "decode": "api",
    "denoise": "api",
    "describe_model": "planning.description.model",
    "evaluate_quantization": "analysis.perplexity",
    "explain": "analysis.explain",
    "load": "api",
    "load_denoiser": "api",
    "load_head": "models.loading.heads",
    "make_drafter": "drafters.making",
    "mesh": "parallel",
    "perplexity": "analysis.perplexity",
    "plan": "planning",
    "save_head": "models.loading.heads",
    "save_model": "models.loading.formats.writing",
    "serve": "api",
    "shard": "parallel",
    "shard_head": "parallel",
    "stream": "api",
    "as_target": "models.custom",
}

__all__ = [
    *_HOMES,
    "adaptive",
    "collaborate",
    "compression",
    "controllers",
    "decoders",
    "diffusion",
    "drafters",
    "processors",
    "speech",
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
