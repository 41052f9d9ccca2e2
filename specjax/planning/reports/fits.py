"""The report on what fits: dtype, context and tree of each model on given chips, estimated from shapes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax import costs
from specjax.catalog.defaults import NATIVE, NATIVE_METHOD
from specjax.catalog.schemes import SCHEME_NAMES
from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.models.storage.format_names import describe_formats
from specjax.planning import denoising
from specjax.planning.inputs.model_configs import builtin_configs, load_config, load_denoiser_settings, module_form
from specjax.planning.inputs.native_heads import default_native, native_head
from specjax.planning.inputs.topologies import parse_topology
from specjax.planning.memory import Memory, available_bytes, longest_context, memory_of, slots_of, target_of
from specjax.planning.traffic import pass_bytes
from specjax.planning.workload import NEW_TOKENS, Workload, make_workload
from specjax.types import Target

DTYPES = ("bfloat16", "float32")
PROPOSED = ("int8", "int4-weights")
"""Schemes that the table of all models proposes for those that do not fit in bfloat16."""

TREE_SIZES = (256, 128, 64, 32, 16, 8, 4, 2, 1)
MAX_PASS_COST = 1.25
"""Largest cost of a pass over a proposed tree in each row, in passes over one token per row (`costs.estimated`)."""

DRAFTING = {"head", "tree", "num_draft_tokens", "options"}
"""Arguments of `make_workload` that a report on what fits does not have."""
PLAIN = "autoregressive"


@dataclass(frozen=True)
class ModelFit:
    """A model in one dtype on given chips. All figures are estimates per device."""

    target: str  # as in --target
    dtype: str
    scheme: str | None  # of --quantize; None: none
    formats: str | None  # of the matrices of a quantised file that keeps them; None: floats, or a scheme
    weights_bytes: int
    module_bytes: int  # weights of the model's own module for multi-token prediction, which drafts too; 0: none
    needed_bytes: int  # of a decode at the context of the report, with the module
    largest_context: int  # prompt tokens with which a decode fits; 0: the model does not fit
    num_nodes: int | None  # the largest tree at the context of the report; 0: nothing fits; None: a diffusion model
    step_seconds: float  # roofline of a plain step: bytes that must move / HBM bandwidth
    reason: str = ""  # why the model does not fit at the context of the report; "": it fits


@dataclass(frozen=True)
class Fits:
    """The models that fit on given chips."""

    topology: str
    device_bytes: int
    batch: int
    context: int
    max_new_tokens: int
    cache_dtype: str | None
    models: tuple[ModelFit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists."""
        return dataclasses.asdict(self)


def what_fits(
    topology: str,
    *,
    target: str | Path | Any | None = None,
    draft: str | None = None,
    method: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    context: int = 1024,
    device_bytes: int | None = None,
    **options: Any,
) -> Fits:
    """Estimate which models fit on chips, with which dtype or scheme, context and tree. Nothing is compiled.

    The estimate counts weights, cache, logits, and the activations of a chunk of the prompt, and leaves 3 % of the
    memory free. The largest tree is the one that fits at `context`, and whose pass costs at most 1.25 passes over one
    token. A model with a module for multi-token prediction drafts with it by default, so its memory counts.

    Args:
      topology: chips such as "v5e:1x1".
      target: a built-in config name, a folder, a GGUF file or a config; None: all built-in configs.
      draft: "native" for the models with a module only; None: all.
      method: "autoregressive" for plain decoding without modules; None: the default.
      dtype: "bfloat16" or "float32"; None: both.
      quantize: a scheme of `specjax.load`; None: the formats of the file and, without `dtype`, also the schemes for
        bfloat16: all for a target, and int8 and int4-weights for the built-in configs that do not fit without one.
        With `keep_quantized` there are no other schemes.
      context: tokens of the prompt.
      device_bytes: memory of a device; None: that of the chip.
      options: other arguments of `make_workload`: batch, max_new_tokens, cache_dtype, data, model and others.

    Raises: UsageError for bad options, or for several devices without their compiler.
    """
    for name in DRAFTING & set(options):
        raise UsageError(f"{name} is an option of drafts, and what fits is estimated without one; leave it out")
    _check_draft(draft, method)
    sources: list[Any] = [target]
    if target is None:
        sources = [name for name in builtin_configs() if draft is None or module_form(name) is not None]
    dtypes = (dtype,) if dtype is not None else DTYPES if quantize is None else DTYPES[:1]
    chip = parse_topology(topology).chip
    room = chip.hbm_bytes if device_bytes is None else device_bytes
    make = lambda source, kind, scheme: _workload(source, topology, kind, scheme, context, options, draft, method)
    first = make(sources[0], dtypes[0], quantize)
    models: list[ModelFit] = []
    for source in sources:
        name = str(source if isinstance(source, str | Path) else source.name)
        fit = lambda kind, scheme, source=source, name=name: _fit(
            name, scheme, make(source, kind, scheme), context, room
        )
        rows = [fit(kind, quantize) for kind in dtypes]
        if dtype is None and quantize is None and not options.get("keep_quantized"):
            schemes = SCHEME_NAMES if target is not None else PROPOSED if rows[0].reason else ()
            rows += [fit(DTYPES[0], scheme) for scheme in schemes]
        models += rows
    return Fits(
        first.topology.name, room, first.batch, context, first.max_new_tokens, first.target.cache_dtype, tuple(models)
    )  # fmt: skip


def _workload(
    source: Any,
    topology: str,
    dtype: str,
    scheme: str | None,
    context: int,
    options: dict[str, Any],
    draft: str | None,
    method: str | None,
) -> Workload:
    """Return the workload of a model and its module, with a shorter context if its texts end earlier."""
    is_name = isinstance(source, str | Path)
    keep = options.get("keep_quantized") if scheme is None else False
    config = load_config(source, dtype, "--target", parse_topology(topology).chip.platform, keep) if is_name else source
    reading = load_denoiser_settings(source) if is_name else options.get("reading")
    new = options.get("max_new_tokens")
    if new is None:  # a short context comes before long texts, and a long one leaves them half of the positions
        new = min(NEW_TOKENS, max(config.max_positions - context, config.max_positions // 2, 1))
    limit = max(config.max_positions - new, 1)
    work = make_workload(
        config,
        topology,
        context=min(context, limit),
        quantize=scheme,
        **{"dtype": dtype} | options | {"reading": reading, "max_new_tokens": new},
    )
    if method == PLAIN or reading is not None:
        return work
    module = (default_native if draft is None else native_head)(source, work.target)
    return work if module is None else dataclasses.replace(work, method=NATIVE_METHOD, head=module)


def _check_draft(draft: str | None, method: str | None) -> None:
    """Raise a UsageError for drafts whose memory is not estimated."""
    if draft not in (None, NATIVE):
        raise UsageError(
            f'--draft {draft}: --fits counts no draft but "{NATIVE}", the model\'s own module; leave it out'
        )
    if method not in (None, PLAIN) or (method == PLAIN and draft is not None):
        raise UsageError(
            f"--method {method}: --fits has --method {PLAIN} or --draft {NATIVE}, which is the default for models with "
            "a module; leave the other out"
        )


def _fit(name: str, scheme: str | None, work: Workload, context: int, device_bytes: int) -> ModelFit:
    """Return the figures of one model at a context, in `device_bytes` bytes of memory."""
    target = target_of(work)
    memory = memory_of(work, target)
    room = available_bytes(device_bytes)
    fewest = 1 if work.reading is None else denoising.window(work)
    needed = memory.total(slots_of(work, work.context, fewest), fewest)
    largest = longest_context(work, memory, fewest, room)
    reason = ""
    if context > work.context:
        reason = f"its texts have at most {work.target.max_positions} tokens"
    elif needed > room:
        reason = f"it needs {gib(needed)} of {gib(room)}"
    nodes = None if work.reading is not None else 0 if reason else _largest_tree(work, target, memory, room)
    moved = pass_bytes(
        work.target, target.pass_params, memory.per_slot - memory.module_per_slot, work.context, states=memory.states,
        experts=(-(-work.batch // work.data), work.expert),
    )  # fmt: skip
    seconds = moved / work.topology.chip.hbm_bandwidth
    formats = describe_formats(work.target) if scheme is None else None
    return ModelFit(
        name,
        work.target.dtype,
        scheme,
        formats,
        memory.weights - memory.module,
        memory.module,
        int(needed),
        largest,
        nodes,
        seconds,
        reason,
    )


def _largest_tree(work: Workload, target: Target, memory: Memory, room: float) -> int:
    """Return the nodes of the largest tree that fits and whose pass is cheap. A tree of one node is plain decoding."""
    rows, chip = -(-work.batch // work.data), work.topology.chip.name
    pass_costs = costs.estimated((1, *TREE_SIZES), rows, costs.dtype_of(target), chip, costs.shares_of(target, chip))[
        1:
    ]
    for nodes, cost in zip(TREE_SIZES, pass_costs, strict=True):
        if cost <= MAX_PASS_COST and memory.total(slots_of(work, work.context, nodes), nodes) <= room:
            return nodes
    return 1
