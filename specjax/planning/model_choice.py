"""Choice of a model and its dtype for the device of this process, as in the notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from specjax.costs.accelerators import CHIP_OF_KIND, GENERIC
from specjax.costs.chips import CHIPS
from specjax.errors import UsageError
from specjax.files.sizes import gib
from specjax.models.loading import DEMO
from specjax.models.loading.heads.target_fit import hub_name
from specjax.planning.inputs.model_configs import hub_id
from specjax.planning.inputs.topologies import one_of
from specjax.planning.reports.fits import Fits, ModelFit, what_fits


@dataclass(frozen=True)
class ModelChoice:
    """A model for a device."""

    source: str  # for specjax.load: a hub id, or the name of the demo model
    dtype: str
    sentence: str  # the reason, for a user
    fit: ModelFit | None = None  # the estimates; None: the memory of the device is unknown


def choose_model(
    targets: Sequence[str], *, dtypes: Sequence[str] = ("float32", "bfloat16"), context: int = 1024
) -> ModelChoice:
    """Return the first of some built-in configs that fits on one device of this process, and its dtype.

    A config is taken in the first of `dtypes` in which it fits. On a CPU, the last config is taken, because larger
    models are slow there. It is also taken on a device of unknown memory.

    Args:
      targets: names of built-in configs, the preferred one first and the smallest last.
      dtypes: "float32" or "bfloat16", the preferred one first.
      context: tokens of the prompt that must fit.

    Raises: UsageError for an unknown name, without a name or dtype, or if none fits.
    """
    targets, dtypes = ([names] if isinstance(names, str) else list(names) for names in (targets, dtypes))
    if not targets or not dtypes:
        raise UsageError(f"a choice needs a target and a dtype, not targets {targets} and dtypes {dtypes}; name one")
    device = jax.devices()[0]
    limit, chip_name = (device.memory_stats() or {}).get("bytes_limit"), CHIP_OF_KIND.get(device.device_kind)
    is_cpu = device.platform == "cpu"
    if is_cpu or (limit is None and chip_name is None):
        source = _source(targets[-1])
        reason = "a CPU is slow for a larger model"
        if not is_cpu:
            reason = f"the memory of this {device.device_kind} is unknown"
        return ModelChoice(source, dtypes[0], f"{source} in {dtypes[0]}: {reason}.")
    chip = CHIPS[chip_name or GENERIC.get(device.platform, "v5e")]
    for target in targets:
        for dtype in dtypes:
            fits = what_fits(
                one_of(chip).name, target=target, dtype=dtype, context=context, device_bytes=limit, model=1
            )
            if not fits.models[0].reason:
                return _choice(fits, _source(target), device.device_kind)
    raise UsageError(
        f"none of {', '.join(targets)} fits on a {device.device_kind} with {gib(fits.device_bytes)} and {context} "
        "prompt tokens; name a smaller model, or give a shorter context"
    )


def _choice(fits: Fits, source: str, device_kind: str) -> ModelChoice:
    """Return the choice of the only model of a report, with its reason."""
    (fit,) = fits.models
    tree = "" if fit.num_nodes is None else f" and trees of up to {fit.num_nodes} nodes"
    sentence = (
        f"{source} in {fit.dtype}: of the {gib(fits.device_bytes)} of this {device_kind} its weights take "
        f"{gib(fit.weights_bytes)}, which leaves room for prompts of up to {fit.largest_context:,} tokens{tree}."
    )
    return ModelChoice(source, fit.dtype, sentence, fit)


def _source(target: str) -> str:
    """Return the name by which `specjax.load` loads a built-in config. The demo model is a package of its own."""
    name = hub_id(target)
    return DEMO if hub_name(DEMO) == name else name
