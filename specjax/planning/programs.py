"""The programs of a decode for chips that are not here: abstract arguments, lowered and compiled.

Nothing is allocated: parameters are shapes (of a built-in config, a config.json or a GGUF header), and the state
between steps is what `jax.eval_shape` says of the real functions of `specjax.decode`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import drafters, parallel
from specjax.controllers import fixed
from specjax.engine.prefill import CHUNK
from specjax.engine.run import PROMPT_BUCKET, _decode, _start, _step
from specjax.engine.step import Inputs, buffer_size
from specjax.errors import UsageError
from specjax.indexing import take_along
from specjax.models import cache as kv
from specjax.parallel.arrays import with_shardings
from specjax.planning import chips, hlo
from specjax.trees.growing import LEVELS
from specjax.types import Array, Drafter, PyTree, Sampling, Target, TokenTree
from specjax.verifiers import exact_verifier

BLOCK = 256
"""Slots of the cache that attention of many tokens reads at a time (pallas_kernels.tree_attention.xla.BLOCK)."""


@dataclass(frozen=True)
class Job:
    """What is to be planned. Hashable; everything that a report depends on, besides the versions of the packages."""

    target: Any  # a config of specjax.models
    topology: chips.Topology
    draft: Any = None
    method: str = "autoregressive"
    tree: str | None = None
    num_draft_tokens: int | None = None
    batch: int = 1
    context: int = 1024  # tokens in the cache when a step is judged
    max_new_tokens: int = 128
    temperature: float = 0.0
    data: int = 1
    model: int = 1
    layer: int = 1
    sequence: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.layer * self.sequence * self.model

    @property
    def is_layer_parallel(self) -> bool:
        """Whether the draft model's layers lie side by side."""
        return self.method == "easyspec" and self.layer > 1

    def mesh(self, devices: list) -> Mesh:
        """In libtpu's order of the devices: "model" along neighbours."""
        return parallel.mesh(self.data, self.model, layer=self.layer, sequence=self.sequence, devices=devices)


class Programs(NamedTuple):
    """The programs of a job, and what they were made from."""

    programs: list[Program]
    arguments: Abstract
    state: PyTree  # of ShapeDtypeStruct with shardings


class Program(NamedTuple):
    """One function and its abstract arguments."""

    name: str
    lower: Callable[[], Any]  # -> jax.stages.Lowered
    arguments: PyTree  # of ShapeDtypeStruct with shardings
    trips: hlo.Trips  # of loops whose trip count depends on the data
    assumed: dict[str, float]  # what `trips` assumes, for the report
    large: frozenset[tuple]  # (dtype, sorted dims) of the caches and parameters of one device


# --- models -----------------------------------------------------------------------------------------------------------


def builtin_configs() -> dict[str, Callable[..., Any]]:
    """`get_config` of every file of configs/, by name."""
    from specjax import configs

    names = sorted(module.name for module in pkgutil.iter_modules(configs.__path__))
    return {name: importlib.import_module(f"specjax.configs.{name}").get_config for name in names}


ON_TPU = {"stacked": True, "cache_lanes": kv.lanes_of("tpu")}
"""How `specjax.load` lays out a model there."""


def load_config(source: str | Path, dtype: str, flag: str = "--target") -> Any:
    """The config of a built-in name, a Hugging Face folder or a GGUF file; no weights are read.

    Raises: UsageError for anything else, naming `flag`.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f'--dtype must be float32 or bfloat16, not "{dtype}"')
    known = builtin_configs()
    name = str(source).replace("-", "_").replace(".", "_").lower()
    path = Path(source).expanduser()
    if name in known and not path.exists():
        return dataclasses.replace(known[name](), dtype=dtype, **ON_TPU)
    options = {"dtype": dtype, **ON_TPU, "name": path.stem if path.is_file() else path.resolve().name}
    try:
        if path.is_dir() and (path / "config.json").is_file():
            return _from_folder(path, options)
        if path.is_file() and path.suffix == ".gguf":
            from specjax.models.loading import gguf

            return gguf.read(path, **options)[0].config
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be read ({error.strerror or error})") from error
    except UsageError as error:
        raise UsageError(f"{flag}: {error}") from None
    raise UsageError(
        f'{flag}: "{source}" is no built-in config, folder with a config.json or .gguf file; built in are '
        f"{', '.join(known)}"
    )


def _from_folder(folder: Path, options: dict) -> Any:
    from specjax.models.loading import families, hf

    where = str(folder / "config.json")
    fields = hf.read_json(folder / "config.json") or {}
    if fields.get("quantization_config"):
        raise UsageError(f"{where} says the weights are quantised, which specjax does not run; give the original")
    family = families.by_hf(fields.get("model_type") or "unnamed", where)
    return family.config_from_hf(fields, where, **options)


def num_params(config: Any) -> int:
    """Parameters of a model."""
    from specjax.models import abstract_params

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


# --- abstract arguments -----------------------------------------------------------------------------------------------


class Abstract(NamedTuple):
    """The arguments of `specjax.decode._decode`, as shapes with shardings."""

    inputs: Inputs
    tokens: PyTree
    lengths: PyTree
    keys: PyTree
    mesh: Mesh


def abstract_target(config: Any, mesh: Mesh) -> Target:
    """Shapes of a model's parameters, spread over as much of the mesh as divides it; on one device the plain model, as
    `load` gives it.
    """
    from specjax.models import abstract_params, make_model
    from specjax.parallel import sharding

    if mesh.size > 1:
        return sharding.abstract_target(config, mesh, parallel.over_that_fits(config, mesh))
    return Target(make_model(config), _place(abstract_params(config), lambda leaf: PartitionSpec(), mesh))


def abstract_inputs(job: Job, devices: list, drafter: Drafter | None = None) -> Abstract:
    """Everything that `decode` would pass to its program, for a drafter of one's own or that of the job.

    Rows of the batch lie over "data", parameters and caches as `specjax.models.layout` says, all else everywhere.
    """
    mesh = job.mesh(devices)
    target = abstract_target(job.target, mesh)
    if drafter is None:
        drafter = drafter_of(job, target, None if job.draft is None else _abstract_draft(job, mesh))
    size = buffer_size(-(-job.context // PROMPT_BUCKET) * PROMPT_BUCKET, job.max_new_tokens, drafter)
    is_greedy = job.temperature == 0
    scalar = _place(jax.ShapeDtypeStruct((), jnp.float32), lambda leaf: PartitionSpec(), mesh)
    eos = _place(jax.ShapeDtypeStruct((1,), jnp.int32), lambda leaf: PartitionSpec(), mesh)
    sampling = Sampling() if is_greedy else Sampling(scalar)
    inputs = Inputs(target, drafter, exact_verifier(drafter, is_greedy), False, sampling, eos)
    rows = jax.ShapeDtypeStruct((job.batch,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((job.batch, size), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), job.batch))
    tokens, rows, keys = _place((tokens, rows, keys), _by_rows(job), mesh)
    return Abstract(inputs, tokens, rows, keys, mesh)


def _abstract_draft(job: Job, mesh: Mesh) -> Target:
    from specjax.parallel import layer_parallel

    if job.is_layer_parallel:
        return layer_parallel.abstract_target(job.draft, mesh)
    return abstract_target(job.draft, mesh)


def drafter_of(job: Job, target: Target, draft: Target | None) -> Drafter:
    """The drafter of the job's method; the parameters of both models may be shapes."""
    from specjax.catalog import find_drafter, make_drafter

    method = find_drafter(job.method)
    options: dict[str, Any] = {"platform": "tpu"} if method.uses("costs") else {}
    if job.tree is not None:
        (option,) = (option for option in method.options if option.name == "tree")
        options["tree"] = option.parse(job.tree)
    elif job.num_draft_tokens is not None:
        if method.size is None:
            raise UsageError(f"--num-draft-tokens does not apply to method {job.method}; leave it out")
        options[method.size] = job.num_draft_tokens
    return make_drafter(job.method, target, draft if "draft" in method.needs else None, **options)


def _by_rows(job: Job) -> Callable[[Any], PartitionSpec]:
    """Over "data" what has one entry per row of the batch."""

    def spec(leaf) -> PartitionSpec:
        is_rows = leaf.ndim and leaf.shape[0] == job.batch and job.batch % job.data == 0
        return PartitionSpec("data") if is_rows and job.data > 1 else PartitionSpec()

    return spec


def _place(tree: PyTree, spec: Callable[[Any], PartitionSpec], mesh: Mesh) -> PyTree:
    return with_shardings(tree, jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree))


def _place_state(job: Job, state: PyTree, mesh: Mesh) -> PyTree:
    """The state between two steps: caches as their models have them."""
    from specjax.models.layout import spread
    from specjax.parallel import layer_parallel

    is_cache = lambda x: isinstance(x, kv.KVCache | kv.Pending)

    def place(tree, config, by_layer=False):
        def one(part):
            if not is_cache(part) or mesh.size == 1 or config is None:
                return _place(part, _by_rows(job), mesh)
            if by_layer:
                shardings = layer_parallel.cache_shardings(config, mesh, part)
            else:
                shardings = spread(config, mesh, parallel.over_that_fits(config, mesh))[1].cache(part)
            return with_shardings(part, shardings)

        return jax.tree.map(one, tree, is_leaf=is_cache)

    placed = place(state, job.target)
    return placed._replace(draft=place(state.draft, job.draft, job.is_layer_parallel))


# --- programs ---------------------------------------------------------------------------------------------------------


def build(job: Job, devices: list, *, drafter: Drafter | None = None, rounds: float | None = None) -> Programs:
    """Prefill, one step, and the whole loop of the job's method.

    Args: rounds: how often the loop of the third is assumed to run; None: once per new token.
    """
    args = abstract_inputs(job, devices, drafter)
    first = args.inputs, args.tokens, args.lengths, args.keys
    static = {"controller": fixed(), "max_new_tokens": job.max_new_tokens}
    with _device_kind(args.mesh):
        state = jax.eval_shape(lambda *leaves: _start(*leaves, **static), *first)
    state = _place_state(job, state, args.mesh)
    chunks = max(1, math.ceil((job.context - 1) / CHUNK))
    blocks = math.ceil(job.context / BLOCK)
    passes = max(args.inputs.drafter.max_depth - 1, 0)  # of the drafter, behind the root's: none stops early
    assumed = {
        "prefill_chunks": float(chunks), "rounds": float(rounds or job.max_new_tokens), "cache_blocks": float(blocks),
        "draft_passes": float(passes),
    }  # fmt: skip
    large = frozenset(_keys_of(state.cache) | _keys_of(args.inputs.target.params))
    # As many blocks as a chunk sees on average.
    in_prefill = lambda loop: chunks if loop.depth == 0 else max(1.0, blocks / 2)
    in_step = _drafting(passes, lambda loop: float(blocks))
    in_loop = _drafting(passes, _in_loop(chunks, blocks, assumed["rounds"]))

    def lowering(function, *args_, **static_):
        def lower():
            with _device_kind(args.mesh):
                return function.lower(*args_, **static_)

        return lower

    second = args.inputs, state
    found = [
        Program("prefill", lowering(_start, *first, **static), first, in_prefill, assumed, large),
        Program("step", lowering(_step, *second, controller=fixed()), second, in_step, assumed, large),
        Program("loop", lowering(_decode, *first, **static), first, in_loop, assumed, large),
    ]
    return Programs(found, args, state)


def _device_kind(mesh: Mesh):
    """Tells kernels which chip they are lowered for; they would ask the devices of this process."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh.size == 1 else contextlib.nullcontext()


def _drafting(passes: float, others: hlo.Trips) -> hlo.Trips:
    """Trips of the loop over the drafter's passes, by its name; of other loops, what `others` says."""
    own = re.compile(rf'op_name="[^"]*/{LEVELS}/while"')
    return lambda loop: float(passes) if own.search(loop.instruction.attributes) else others(loop)


def _in_loop(chunks: float, blocks: float, rounds: float) -> hlo.Trips:
    """Trips in the whole program: the loops over prompts come first, the loop over rounds last; within them, blocks."""
    last: set[str] = set()

    def trips(loop: hlo.Loop) -> float:
        if loop.depth == 0:
            if loop.index == loop.siblings - 1:
                last.add(loop.instruction.name)
                return rounds
            return chunks
        return blocks if loop.path[0] in last else max(1.0, blocks / 2)

    return trips


def shard_bytes(tree: PyTree) -> int:
    """Bytes that one device holds of shapes with shardings."""
    return sum(math.prod(_local(leaf)) * _item_bytes(leaf.dtype) for leaf in jax.tree.leaves(tree))


def _local(leaf) -> tuple[int, ...]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _item_bytes(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize


def _keys_of(tree: PyTree) -> set[tuple]:
    """(dtype, sorted dims) of the arrays of over a megabyte that one device holds."""
    names = {"bfloat16": "bf16", "float32": "f32", "int8": "s8"}
    leaves = [leaf for leaf in jax.tree.leaves(tree) if str(leaf.dtype) in names]
    return {
        (names[str(leaf.dtype)], tuple(sorted(_local(leaf))))
        for leaf in leaves
        if math.prod(_local(leaf)) * leaf.dtype.itemsize > 1 << 20
    }


def probe(num_nodes: int) -> Drafter:
    """A drafter that costs nothing: a chain of `num_nodes` nodes, the root included, of token 0.

    A step with it is one verify pass over so many nodes; the law of the draft does not matter for what a pass costs.
    """
    if num_nodes == 1:
        return drafters.autoregressive()
    from specjax.trees.operations import chain

    def propose(params, keys, state, context, limit) -> tuple[TokenTree, PyTree]:
        root = take_along(context.tokens, context.length[:, None] - 1, 1)
        tokens = jnp.pad(root, ((0, 0), (0, num_nodes - 1)))
        depth: Array = jnp.arange(num_nodes)
        return chain(tokens, jnp.broadcast_to(depth <= limit[:, None], tokens.shape)), state

    return Drafter(
        init=lambda params, context: (),
        propose=propose,
        update=lambda params, state, tree, verdict, output: state,
        num_nodes=num_nodes,
        max_depth=num_nodes - 1,
    )
