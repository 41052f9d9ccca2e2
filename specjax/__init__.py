"""specjax: speculative and parallel decoding in JAX.

target, tokenizer = specjax.load()
result = specjax.decode(target, specjax.drafters.prompt_lookup(), [tokenizer.chat("Hello")], key=key, max_new_tokens=64)
print(tokenizer.decode(result.to_lists()[0]))
"""

from specjax import controllers, decoders, drafters, trees, verifiers
from specjax.catalog.methods import METHODS, make_drafter
from specjax.engine.prepare import Settings
from specjax.engine.requests import Request, arrivals
from specjax.engine.results import DecodeResult, StreamStep
from specjax.engine.serve import Served
from specjax.engine.text import Detokenizer
from specjax.errors import UsageError
from specjax.facade import decode, serve, stream
from specjax.parallel import mesh, shard
from specjax.types import Capabilities, Controller, Drafter, Model, Output, Target, TokenTree, Verdict
from specjax.verifiers import VERIFIERS, Verifier
from specjax.version import __version__

__all__ = [
    "METHODS",
    "VERIFIERS",
    "Capabilities",
    "Controller",
    "DecodeResult",
    "Detokenizer",
    "Drafter",
    "Model",
    "Output",
    "Request",
    "Served",
    "Settings",
    "StreamStep",
    "Target",
    "TokenTree",
    "UsageError",
    "Verdict",
    "Verifier",
    "__version__",
    "arrivals",
    "compile_report",
    "controllers",
    "decode",
    "decoders",
    "drafters",
    "load",
    "load_head",
    "make_drafter",
    "mesh",
    "plan",
    "save_head",
    "serve",
    "shard",
    "stream",
    "trees",
    "verifiers",
]


def __getattr__(name: str):
    # Model families need flax and loaders more still: imported when first asked for.
    if name == "load":
        from specjax.models.loading import load

        return load
    if name in ("load_head", "save_head"):
        from specjax.models.loading import heads

        return getattr(heads, name)
    if name in ("compile_report", "plan"):
        from specjax import planning

        return getattr(planning, name)
    if name in ("tree", "datastore"):  # former names, which warn
        import importlib

        return importlib.import_module(f"specjax.{name}")
    raise AttributeError(f"module 'specjax' has no attribute '{name}'")
