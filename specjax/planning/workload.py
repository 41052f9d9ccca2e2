"""The workload of a plan: a decode with its models, method, sizes, and devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh

from specjax import parallel, trees
from specjax.catalog import METHODS, Method, find_drafter, of_kind
from specjax.catalog.defaults import IMAGE_PATCHES, NATIVE, NATIVE_METHOD
from specjax.catalog.schemes import check_cache_dtype, check_quantize, of_drafts
from specjax.errors import UsageError
from specjax.models import LlamaConfig
from specjax.models.heads.kinds import KINDS
from specjax.models.layout import fits_heads
from specjax.models.loading.families.denoisers import DenoiserSettings
from specjax.models.storage import quantized_config
from specjax.models.storage.format_names import describe_formats
from specjax.numerics.same_bits import SameBitsError, unsupported_reason
from specjax.planning.inputs.denoiser_inputs import check_autoregressive, check_denoiser, in_blocks
from specjax.planning.inputs.image_inputs import check_images
from specjax.planning.inputs.model_configs import load_config, load_denoiser_settings, num_params, num_params_of_head
from specjax.planning.inputs.native_heads import default_native, native_head
from specjax.planning.inputs.topologies import Topology, parse_topology
from specjax.planning.inputs.warping import GREEDY, Warping

NEW_TOKENS = 128
"""New tokens of a text by default."""


@dataclass(frozen=True)
class Workload:
    """A decode to plan. It is hashable and contains everything that a report depends on, except package versions."""

    target: Any  # a config of specjax.models
    topology: Topology
    draft: Any = None
    head: Any = None  # a config of specjax.models.heads; the method is its kind
    method: str = "autoregressive"
    tree: str | None = None
    num_draft_tokens: int | None = None
    options: tuple[tuple[str, str], ...] = ()  # other options of the method as texts, by name
    batch: int = 1
    context: int = 1024  # tokens in the cache for the costs of a step
    max_new_tokens: int = NEW_TOKENS
    warping: Warping = GREEDY
    data: int = 1
    model: int = 1
    layer: int = 1
    sequence: int = 1
    expert: int = 1
    reading: DenoiserSettings | None = (
        None  # settings of a diffusion model as a denoiser; None: the model is autoregressive
    )
    image_tiles: int = 0  # of each prompt, for models that read images
    image_patches: int = IMAGE_PATCHES  # of each image, for models that read images of any size

    @property
    def devices(self) -> int:
        return self.data * self.layer * self.sequence * self.expert * self.model

    @property
    def platform(self) -> str:
        """Return JAX's backend for the chips: "tpu" or "gpu"."""
        return self.topology.chip.platform

    @property
    def is_layer_parallel(self) -> bool:
        """Return True if the draft model's layers are distributed over devices."""
        return self.method == "easyspec" and self.layer > 1

    @property
    def plain(self) -> Workload:
        """Return the same workload without a draft."""
        return dataclasses.replace(
            self, method="autoregressive", draft=None, head=None, tree=None, num_draft_tokens=None, options=()
        )

    def mesh(self, devices: list) -> Mesh:
        """Return the mesh in the compiler's device order, with neighbouring devices along "model"."""
        sizes = {"layer": self.layer, "sequence": self.sequence, "expert": self.expert}
        return parallel.mesh(self.data, self.model, **sizes, devices=devices)


def make_workload(
    target: str | Any,
    topology: str,
    *,
    draft: str | Any | None = None,
    head: str | None = None,
    method: str | None = None,
    tree: str | None = None,
    num_draft_tokens: int | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    batch: int = 1,
    context: int = 1024,
    max_new_tokens: int | None = None,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    same_bits: bool = False,
    quantize: str | None = None,
    keep_quantized: bool | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    data: int = 1,
    model: int | None = None,
    layer: int = 1,
    sequence: int = 1,
    expert: int = 1,
    reading: DenoiserSettings | None = None,
    block: int | None = None,
    image_tiles: int = 0,
    image_patches: int = IMAGE_PATCHES,
) -> Workload:
    """Check the options of a plan before anything is compiled.

    Args:
      reading: denoiser settings for a `target` that is a config. For names and files they are loaded.
      block: columns of a block of a diffusion model.
      image_tiles: tiles of images in each prompt, whose vectors are a part of `context`. Each image of a model that
        reads any size has room for `image_patches` patches.
      draft: a built-in config, a folder, a GGUF file or a config; "native" is the multi-token-prediction module of the
        target's release or files, which is the default for a target that has one.
      head: a kind of draft head with its authors' shapes, such as "eagle3", or with changes, such as
        "eagle3:draft_vocab_size=8192".
      options: other options of the method as texts, by name.
      data, layer, sequence, expert, model: axes of the mesh, as in `specjax.mesh`. model=None uses as many devices as
        the target's heads can be split over.
      max_new_tokens: None: 128, or as many as the models' positions leave after the context.
      same_bits, quantize, keep_quantized: as in `specjax.load`, for the target. Quantised files are kept in their
        formats by default, as on TPUs and GPUs, and built-in configs have floats unless keep_quantized is True.
      temperature, top_k, top_p, min_p, *_penalty: as in `specjax.decode` and `specjax.processors`. A program computes
        the options that are given; their values do not matter, except that temperature 0 is the greedy program.
      cache_dtype: "int8" for both models' caches, or a compressed form such as "gear:4" for the target's. None: the
        dtype of their configs.

    Raises: UsageError that names the option at fault.
    """
    check_cache_dtype(cache_dtype, "--cache-dtype")
    check_quantize(quantize, keep_quantized, "--quantize")
    slice_ = parse_topology(topology)
    is_native = isinstance(draft, str) and draft == NATIVE
    if is_native and head is not None:
        raise UsageError("--head and --draft both draft; leave one out")
    uses_default = draft is None and head is None and method in (None, NATIVE_METHOD)
    draft, head = (None, NATIVE_METHOD) if is_native else (draft, head)
    kind = None if head is None else head.partition(":")[0]
    if kind is not None and kind not in KINDS:
        raise UsageError(f'--head: "{kind}" is not a kind of head; choose one of {", ".join(KINDS)}')

    def load(source, flag: str, keep: bool | None):
        is_name = isinstance(source, str | Path)
        config = load_config(source, dtype, flag, slice_.chip.platform, keep) if is_name else source
        form = cache_dtype if flag == "--target" else of_drafts(cache_dtype)
        return config if form is None else dataclasses.replace(config, cache_dtype=form)

    target_config = load(target, "--target", keep_quantized if quantize is None else False)
    if quantize is not None:
        target_config = quantized_config(target_config, quantize, slice_.chip.platform)
    if same_bits:
        target_config = _with_same_bits(target_config, slice_.chip.platform, {"data": data, "sequence": sequence})
    reading = load_denoiser_settings(target) if isinstance(target, str | Path) else reading
    if reading is None:
        check_autoregressive(target_config, method, block)
    else:
        drafts = {
            "--draft": draft, "--head": head, "--tree": tree, "--num-draft-tokens": num_draft_tokens,
            "--same-bits": same_bits or None,
        }  # fmt: skip
        method = check_denoiser(target_config, reading, method, drafts)
        reading, options = in_blocks(reading, METHODS[method], options, block)
    head_config: Any = native_head(target, target_config) if is_native else None
    if uses_default and reading is None:
        head_config = default_native(target, target_config)
        kind = None if head_config is None else NATIVE_METHOD
    method = method or kind or ("two_model" if draft is not None else "autoregressive")
    row = METHODS[method] if reading is not None else _drafter(method)
    _check_head(row, kind, draft)
    _check_needs(row, draft)
    tree = None if tree is None else _tree(row, tree, num_draft_tokens)
    _check_options(row, options, tree, num_draft_tokens)
    for flag, value in (("--batch-size", batch), ("--context", context),
                        ("--max-new-tokens", 1 if max_new_tokens is None else max_new_tokens),
                        ("--data", data), ("--layer", layer), ("--sequence", sequence), ("--expert", expert),
                        ("--num-draft-tokens", 1 if num_draft_tokens is None else num_draft_tokens),
                        ("--model", 1 if model is None else model)):  # fmt: skip
        if value < 1:
            raise UsageError(f"{flag} must be at least 1, not {value}")
    warping = Warping(
        float(temperature), top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty
    ).check()  # fmt: skip
    if reading is not None and warping.processors(lambda shape: shape):
        raise UsageError("penalties need a model that decodes from left to right; leave them out for a diffusion model")
    if batch % data:
        raise UsageError(f"--batch-size {batch} cannot be split over --data {data}; make it a multiple")

    draft_config = None if draft is None else load(draft, "--draft", None if keep_quantized else keep_quantized)
    if draft_config is not None and not _close(draft_config.vocab_size, target_config.vocab_size):
        raise UsageError(
            f"--draft has {draft_config.vocab_size} tokens in its vocabulary and the target "
            f"{target_config.vocab_size}; choose a draft model of the same family"
        )
    if head is not None and not is_native:
        head_config = _read_head(head, target_config)
    max_positions = min(c.max_positions for c in (target_config, draft_config) if c is not None)
    max_new_tokens = _new_tokens(context, max_new_tokens, max_positions)
    if method == "easyspec" and layer > 1:
        _check_layers(draft_config, layer)
    _check_expert(target_config, expert)
    check_images(target_config, image_tiles, image_patches, context)
    axes = {"--data": data, "--layer": layer, "--sequence": sequence, "--expert": expert}
    model = _model_axis(target_config, slice_, axes, model)
    return Workload(
        target_config, slice_, draft_config, head_config, method, tree, num_draft_tokens,
        tuple(sorted(options.items())), batch, context, max_new_tokens, warping, data, model, layer,
        sequence, expert, reading, image_tiles, image_patches,
    )  # fmt: skip


def _drafter(method: str) -> Method:
    """Return the row of a drafter. Raises: UsageError for another method."""
    try:
        return find_drafter(method)
    except UsageError as error:
        raise UsageError(f"--method: {error}") from None


def _check_needs(row: Method, draft: Any) -> None:
    """Raise a UsageError for a method with inputs that a plan does not have, or with a missing or extra draft model."""
    needs = sorted(row.needs - {"draft", "head"})
    if needs:
        heads_text = " and ".join(f"{'an' if need[0] in 'aeiou' else 'a'} {need}" for need in needs)
        raise UsageError(f"--method {row.name} needs {heads_text}, which a plan cannot model; choose another method")
    if ("draft" in row.needs) != (draft is not None):
        fix = "give one with --draft" if draft is None else "leave --draft out or use --method two_model"
        raise UsageError(f"--method {row.name} needs {'a' if draft is None else 'no'} draft model; {fix}")


def _tree(row: Method, text: str, num_draft_tokens: int | None) -> str:
    """Return the text of a tree without files, because reports are cached by it. Raises: UsageError."""
    option = row.option("tree")
    if option is None or num_draft_tokens is not None:
        methods = " and ".join(name for name, other in of_kind("drafter").items() if other.option("tree"))
        raise UsageError(f"--tree applies only to {methods}, without --num-draft-tokens, which also sets the size")
    option.parse(text, "--tree")
    return trees.inline(text)


def _check_head(row: Method, kind: str | None, draft: Any) -> None:
    """Raise a UsageError for a missing head, or a kind of head that the method does not use."""
    if kind is not None and draft is not None:
        raise UsageError("--head and --draft both draft; leave one out")
    if kind is not None and kind != row.name and "head" in row.takes:
        raise UsageError(
            f"--method {row.name} uses its head at a rate that depends on the text, which a plan cannot model; "
            f"leave --method out to plan steps in which {kind} drafts"
        )
    if kind is not None and kind != row.name:
        raise UsageError(f"--head {kind} needs --method {kind}, not {row.name}; leave --method out")
    if kind is None and "head" in row.needs:
        raise UsageError(f"--method {row.name} needs a learned head; give one with --head {row.name}")


def _read_head(text: str, target: Any) -> Any:
    """Return the config of a head for a target, from a text such as `eagle3:draft_vocab_size=8192`."""
    kind, _, changes_text = text.partition(":")
    changes: dict[str, Any] = {}
    for part in changes_text.split(",") if changes_text else ():
        change = KINDS[kind].parse_change(part)
        if change is None:
            forms = " or ".join(KINDS[kind].forms) or "nothing"
            raise UsageError(f'--head {text}: {kind} takes {forms}, and not "{part}"')
        changes |= dict([change])
    if not isinstance(target, LlamaConfig):
        raise UsageError(f"--head needs a target of the Llama family, and {target.name} is not one")
    return KINDS[kind].of_target(target, **changes)


def _check_options(row: Method, options: Mapping[str, str], tree: str | None, num_draft_tokens: int | None) -> None:
    """Raise a UsageError for unknown options, options that have a separate flag, or invalid values."""
    for name, text in options.items():
        option = row.option(name)
        if option is None:
            names = ", ".join(option.name for option in row.options) or "no options"
            raise UsageError(f'--set {name}={text}: method {row.name} has no option "{name}", but {names}')
        if name == "tree" or (name == row.size and num_draft_tokens is not None):
            raise UsageError(
                f"--set {name}={text}: give it with {'--tree' if name == 'tree' else '--num-draft-tokens'}"
            )
        if name == row.size and tree is not None:
            raise UsageError(f"--tree and --set {name} both set the size of the draft; leave one out")
        option.parse(text, f"--set {name}")


def _with_same_bits(config: Any, platform: str, axes: Mapping[str, int]) -> Any:
    """Return a config with `same_bits`. Raises: UsageError where it was not shown to hold."""
    try:
        reason = unsupported_reason(config.dtype, config.cache_dtype, platform, axes)
        if reason is not None:
            raise SameBitsError(reason)
        return dataclasses.replace(config, same_bits=True)
    except SameBitsError as error:
        raise SameBitsError(error.reason, "--same-bits", "leave --same-bits out") from None


def _check_layers(draft: Any, layer: int) -> None:
    """Raise a UsageError for a draft model with too few layers for a group of `layer`."""
    if draft.num_layers < layer + 2:
        raise UsageError(
            f"--layer {layer}: {draft.name} has {draft.num_layers} layers, but a group needs {layer} layers between "
            "the first and the last; lower it"
        )


def _new_tokens(context: int, max_new_tokens: int | None, max_positions: int) -> int:
    """Return the new tokens of a text. Raises: UsageError if the context leaves no room for them."""
    if max_new_tokens is None and context >= max_positions:
        raise UsageError(f"--context {context} fills the {max_positions} positions of the models; lower it")
    new = min(NEW_TOKENS, max_positions - context) if max_new_tokens is None else max_new_tokens
    if context + new > max_positions:
        total = context + new
        raise UsageError(f"--context plus --max-new-tokens is {total}, above the models' {max_positions}; lower one")
    return new


def _close(one: int, other: int) -> bool:
    """Return True if two vocabulary sizes differ by at most 1 %, as by padding and special tokens."""
    return abs(one - other) <= max(one, other) // 100


def _check_expert(config: Any, expert: int) -> None:
    """Raise a UsageError for an axis "expert" that the model cannot use."""
    if expert == 1:
        return
    if config.experts is None:
        raise UsageError(f"--expert {expert} needs a mixture of experts, and {config.name} is none; use --model")
    if config.experts.num_experts % expert:
        raise UsageError(f"--expert {expert} does not divide the {config.experts.num_experts} experts of {config.name}")


def _model_axis(config: Any, slice_: Topology, other_axes: dict[str, int], model: int | None) -> int:
    """Return the size of the axis "model".

    Raises: UsageError for too many devices, or an axis that does not divide the heads.
    """
    free_devices, layer = slice_.num_devices // math.prod(other_axes.values()), other_axes["--layer"]
    heads_parts = layer * other_axes["--expert"]
    if free_devices < (model or 1):
        axes_text = " times ".join(f"{flag} {n}" for flag, n in (other_axes | {"--model": model or 1}).items() if n > 1)
        raise UsageError(f"{axes_text} is more than the {slice_.num_devices} devices of {slice_.name}")
    fitting = [n for n in range(1, free_devices + 1) if fits_heads(config, heads_parts * n)]
    if model is None and fitting:
        return fitting[-1]
    if model not in fitting:
        heads_text = f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.name}"
        flags = (
            f"--layer {layer}" if model is None else f"--model {model}" + (f" x --layer {layer}" if layer > 1 else "")
        )
        fix = f"--model {' or '.join(map(str, fitting))}" if fitting else "a lower --layer"
        raise UsageError(f"{flags} does not divide the {heads_text}; choose {fix}")
    return model


def describe(work: Workload) -> dict[str, Any]:
    """Return the options of the plan as JSON."""
    names = (
        "method", "tree", "num_draft_tokens", "batch", "context", "max_new_tokens", "data", "layer", "sequence",
        "expert", "model", "image_tiles",
    )  # fmt: skip
    return {
        "options": dict(work.options),
        "reading": None if work.reading is None else work.reading._asdict(),
        "target": work.target.name,
        "target_params": num_params(work.target),
        "draft": work.draft.name if work.draft else None,
        "draft_params": num_params(work.draft) if work.draft else None,
        "head_params": num_params_of_head(work.method, work.head) if work.head else None,
        "dtype": str(work.target.dtype),
        "quantized": describe_formats(work.target),
        "cache_dtype": work.target.cache_dtype,
        "same_bits": work.target.same_bits,
        "topology": work.topology.name,
        "devices": work.devices,
        **work.warping.describe(),
        **{name: getattr(work, name) for name in names},
    }
