"""Groups of options: frozen dataclasses with flags as fields, and the decorator that gives them to a command."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from specjax.catalog.schemes import check_cache_dtype, check_quantize
from specjax.cli.options import common as o
from specjax.errors import require


def with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of the option groups among the function's parameters as flags.

    Typer reads the signature of the result. A group's checks run when the group is built.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        group = parameter.annotation
        if not dataclasses.is_dataclass(group):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints, fields = get_type_hints(group, include_extras=True), dataclasses.fields(group)
        groups[name] = group, [field.name for field in fields]
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields
        ]

    def command(**values: Any) -> None:
        built = {
            name: group(**{field: values.pop(field) for field in fields}) for name, (group, fields) in groups.items()
        }
        function(**values, **built)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def flag_values(*groups: Any) -> dict[str, Any]:
    """Return the values of all flags of some groups by name."""
    return {name: value for group in groups for name, value in vars(group).items()}


def refuse_flags(groups: tuple[Any, ...], allowed: frozenset[str], reason: str) -> None:
    """Raise a UsageError for a flag that is set and not allowed. `reason` follows the flag in the message."""
    for group in groups:
        for field in dataclasses.fields(group):
            is_set = getattr(group, field.name) not in (field.default, [], ())
            require(not is_set or field.name in allowed, f"{flag_of(field.name)} {reason}; remove it")


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + {"settings": "set", "show_order": "show"}.get(name, name).replace("_", "-")


@dataclass(frozen=True)
class ModelOptions:
    """The models, and how they are loaded."""

    target: o.TargetOption = None
    draft: o.DraftOption = None
    dtype: o.DtypeOption = "auto"
    no_cache: o.NoCacheOption = False
    cache_dtype: o.CacheDtypeOption = None
    max_positions: o.PositionsOption = None
    same_bits: o.SameBitsOption = False
    quantize: o.QuantizeOption = None
    keep_quantized: o.KeepQuantizedOption = None
    draft_quantize: o.DraftQuantizeOption = None
    block: o.BlockOption = None
    mask_token: o.MaskTokenOption = None
    head_set: o.HeadSetOption = None
    template_args: o.TemplateArgsOption = None

    def __post_init__(self):
        require(
            self.dtype in ("auto", "float32", "bfloat16"),
            f'--dtype must be auto, float32 or bfloat16, not "{self.dtype}"',
        )
        check_cache_dtype(self.cache_dtype, "--cache-dtype")
        require(
            not self.same_bits or self.dtype != "float32",
            "--same-bits needs bfloat16, and --dtype is float32; leave one of them out",
        )
        check_quantize(self.quantize, self.keep_quantized)
        check_quantize(self.draft_quantize, self.keep_quantized, "--draft-quantize")
        require(
            self.draft_quantize is None or self.draft is not None,
            "--draft-quantize rounds a draft model, and there is none; give one with --draft",
        )
        self.head_settings()
        o.parse_template_args(self.template_args)

    def check_raw(self, raw: bool) -> None:
        """Raise a UsageError if --template-args meets --raw, which skips the template."""
        require(
            not raw or self.template_args is None,
            "--template-args needs the chat template, and --raw leaves the template out; remove one of them",
        )

    def check_head(self, has_head: bool) -> None:
        """Raise a UsageError for settings of a draft head without one, or of a draft model for a head."""
        require(
            not has_head or self.draft_quantize is None,
            "--draft-quantize is for a draft model, and --draft is a head, which stays in floats; remove "
            "--draft-quantize",
        )
        require(
            has_head or not self.head_set, "--head-set is for a draft head, and --draft is not one; remove --head-set"
        )

    def head_settings(self) -> dict[str, str]:
        """Return the settings of the draft head by name. Raises: UsageError for a text that sets none, or one twice."""
        settings: dict[str, str] = {}
        for text in self.head_set or ():
            name, equals, value = text.partition("=")
            require(bool(name and equals and value), f"--head-set {text} must be NAME=VALUE, such as from_anchor=yes")
            require(name not in settings, f"--head-set {name} is given twice; remove one")
            settings[name] = value
        return settings


@dataclass(frozen=True)
class DraftOptions:
    """The flags of drafting and verification."""

    datastore: o.DatastoreOption = None
    num_draft_tokens: o.NumDraftTokensOption = None
    tree: o.TreeOption = None
    draft_stop: o.DraftStopOption = None
    stop: o.OldStopOption = None
    exit_layer: o.ExitOption = None
    settings: o.SetOption = None
    source: o.SourceOption = None
    controller: o.ControllerOption = None
    costs: o.CostsOption = None
    verifier: o.VerifierOption = None
    sampling: o.SamplingOption = "speculative"

    @property
    def named(self) -> dict[str, Any]:
        """Return the flags that set one option of a method each."""
        return {
            "--num-draft-tokens": self.num_draft_tokens, "--tree": self.tree, "--draft-stop": self.draft_stop,
            "--exit-layer": self.exit_layer,
        }  # fmt: skip

    @property
    def is_default(self) -> bool:
        """Return True if no flag sets how to draft."""
        return all(
            value is None or value == [] for name, value in vars(self).items() if name not in ("costs", "sampling")
        )


@dataclass(frozen=True)
class WarpOptions:
    """Length, distribution and seed of the text."""

    max_new_tokens: o.LengthOption = 128
    temperature: o.OptionalTemperatureOption = 0.0
    top_k: o.TopKOption = None
    top_p: o.TopPOption = None
    seed: o.SeedOption = 0

    def __post_init__(self):
        o.check_minimum("--max-new-tokens", self.max_new_tokens, 1)
        o.check_seed(self.seed)


@dataclass(frozen=True)
class SamplingOptions(WarpOptions):
    """Length, distribution and seed of the text, with --min-p."""

    min_p: o.MinPOption = None

    @property
    def different(self) -> dict[str, Any]:
        """Return the values that shape the distribution and differ from greedy decoding."""
        values = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        return {
            name: value for name, value in values.items() if value is not None and (name, value) != ("temperature", 0)
        }


@dataclass(frozen=True)
class GenerateSampling(SamplingOptions):
    """Length, distribution and seed of the text; without --temperature a method chooses the temperature."""

    temperature: o.MethodTemperatureOption = None

    @property
    def explicit(self) -> dict[str, Any]:
        """Return the values of the flags that shape the distribution and are set."""
        names = "temperature", "top_k", "top_p", "min_p"
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class PromptOptions:
    """The flags that turn a prompt into tokens."""

    raw: o.RawOption = False
    system: o.SystemOption = None

    def __post_init__(self):
        o.check_system(self.raw, self.system)
