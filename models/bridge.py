"""Conversion of NNX modules to the pure functions of `specjax.Model`."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from specjax.catalog.schemes import check_cache_dtype, compressed_form
from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.decoder import Decoder, DecoderConfig
from specjax.models.gear import slots as gear_slots
from specjax.models.gear.codec import GearForm
from specjax.models.gemma3 import Gemma3Config
from specjax.models.hybrid import memory as hybrid_memory
from specjax.models.hybrid.config import HybridConfig
from specjax.models.hybrid.decoder import HybridDecoder
from specjax.models.image_tokens import captions as image_captions
from specjax.models.image_tokens.captions import CaptionConfig
from specjax.models.image_tokens.chameleon import ChameleonConfig
from specjax.models.image_tokens.janus import JanusConfig, JanusDecoder
from specjax.models.image_tokens.llamagen import LlamaGenConfig, LlamaGenDecoder
from specjax.models.layers import run_layers
from specjax.models.layout import Layout, shard_config
from specjax.models.llama import LlamaConfig
from specjax.models.seq2seq import memory as seq2seq_memory
from specjax.models.seq2seq.bart import BartModel, WhisperModel
from specjax.models.seq2seq.config import BartConfig, Seq2SeqConfig, T5Config, WhisperConfig
from specjax.models.seq2seq.model import pass_params
from specjax.models.seq2seq.t5 import T5Model
from specjax.models.skipping.attention_layers import SkippingLayers
from specjax.models.storage import check_exact_products, quantize_params, with_formats
from specjax.models.vision import memory as vision_memory
from specjax.models.vision import model as vision_model
from specjax.models.vision.config import VisionLanguageConfig
from specjax.numerics.global_arrays import with_auto_axes
from specjax.numerics.same_bits import check_same_bits
from specjax.types import Array, Capabilities, EncodedInputs, Model, PyTree

CONFIGS = (
    LlamaConfig, Gemma3Config, HybridConfig, T5Config, BartConfig, WhisperConfig, VisionLanguageConfig, LlamaGenConfig,
    ChameleonConfig, JanusConfig, CaptionConfig,
)  # fmt: skip
Config = DecoderConfig


def abstract_module(config: Config) -> nnx.Module:
    """Build the module of `config` with shapes for parameters, without allocating any.

    Separate layers of one kind are built once and copied: 48 layers of Qwen3-Next take 0.1 s instead of 20.
    """
    decoder = _decoder_class(config)
    if config.stacked:
        return nnx.eval_shape(lambda: decoder(config, rngs=nnx.Rngs(0)))
    module = nnx.eval_shape(lambda: decoder(config, rngs=nnx.Rngs(0), layers=nnx.List([])))
    built: dict[Any, nnx.Module] = {}
    for layer in range(config.num_layers):
        kind = config.kind_of(layer)
        if kind not in built:
            built[kind] = nnx.eval_shape(lambda layer=layer: decoder.make_layer(config, layer, nnx.Rngs(0)))
        module.layers.append(nnx.clone(built[kind]))
    return module


def _decoder_class(config: Config) -> Any:
    classes: dict[type, Any] = {
        HybridConfig: HybridDecoder, T5Config: T5Model, WhisperConfig: WhisperModel, BartConfig: BartModel,
        VisionLanguageConfig: vision_model.ImageDecoder, CaptionConfig: image_captions.CaptionDecoder,
        LlamaGenConfig: LlamaGenDecoder, JanusConfig: JanusDecoder,
    }  # fmt: skip
    return next((module for kind, module in classes.items() if isinstance(config, kind)), Decoder)


def is_text_decoder(config: Config) -> bool:
    """Return True for a model whose layers are all those of `Decoder`, without an encoder or a tower."""
    return _decoder_class(config) is Decoder


@functools.cache
def _abstract(config: Config):
    """Return (graphdef, pure dict of ShapeDtypeStructs) of the module of `config`."""
    graphdef, state = nnx.split(abstract_module(config))
    return graphdef, with_formats(nnx.to_pure_dict(state), config)


def abstract_params(config: Config) -> PyTree:
    """Return shapes and dtypes of the parameters, as a nested dict of `jax.ShapeDtypeStruct`.

    A quantised matrix is a `QuantizedArray` of them.
    """
    return _abstract(config)[1]


def init_params(config: Config, key) -> PyTree:
    """Initialise random parameters, for tests and for training from scratch."""
    module = _decoder_class(config)(config, rngs=nnx.Rngs(params=key))
    return quantize_params(nnx.to_pure_dict(nnx.split(module)[1]), config)


def gear_form(config: Config, mesh: Mesh | None = None) -> GearForm | None:
    """Return the form of a compressed cache; None for other caches.

    Raises: UsageError for a `cache_dtype` that does not exist, and for a model whose cache cannot be compressed.
    """
    check_cache_dtype(config.cache_dtype)
    options = compressed_form(config.cache_dtype)
    if options is None:
        return None
    reasons = {
        "it has recurrent layers or layers of several kinds": isinstance(config, HybridConfig),
        "its attention is latent": config.latent is not None,
        "its attention has windows": config.window is not None,
        "it is spread over a mesh": mesh is not None,
        "same_bits is not shown for it": config.same_bits,
        "it has an encoder": isinstance(config, Seq2SeqConfig),
        "it reads images": isinstance(config, VisionLanguageConfig),
        "it reads captions": isinstance(config, CaptionConfig),
        f"its heads of {config.head_dim} numbers do not fill whole bytes": config.head_dim * options["bits"] % 8 != 0,
        f"its heads of {config.head_dim} numbers are too large": config.head_dim > 256,
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(
                f'cache_dtype "{config.cache_dtype}" does not support {config.name}, because {reason}; leave '
                "cache_dtype out"
            )
    return GearForm(**options)


def has_repeated_heads(config: Config, params: PyTree) -> bool:
    """Return True if the parameters do not have the shapes of their config, because a mesh repeats some heads."""
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    return shapes(params) != shapes(abstract_params(config))


def make_model(config: Config, mesh: Mesh | None = None, over: tuple[str, ...] | None = None) -> Model:
    """Build the `Model` of a config. Equal arguments return the same object, so a second `decode` compiles nothing.

    With a mesh, the parameters are those of `specjax.shard`, which also documents `over`.

    Raises: UsageError for a `cache_dtype` that does not exist, for a cache or a mesh that does not fit the model, and
      for `same_bits` where it was not shown to hold.
    """
    gear_form(config, mesh)
    kinds: dict[type, str] = {
        Seq2SeqConfig: "encoder-decoder",
        VisionLanguageConfig: "model with images",
        JanusConfig: "model of images",
        CaptionConfig: "model of captions",
    }
    kind = next((kind for form, kind in kinds.items() if isinstance(config, form)), None)
    on_meshes = kind is None or isinstance(config, VisionLanguageConfig)
    if (mesh is not None and not on_meshes) or (kind is not None and config.same_bits):
        option = "same_bits" if config.same_bits else "a mesh"
        raise UsageError(f"the {kind} {config.name} does not support {option} yet; leave it out")
    if config.same_bits:
        check_same_bits(config.dtype, config.cache_dtype, mesh, over)
        check_exact_products(config)
    return _make_model(config, None if mesh is None else with_auto_axes(mesh), over)


@functools.cache
def _make_model(config: Config, mesh: Mesh | None, over: tuple[str, ...] | None) -> Model:
    """Build the model for `make_model`, which makes all forms of its call equal."""
    unsharded_config = config
    layout = None
    if mesh is not None:
        config, layout = shard_config(config, mesh, over)
    graphdef, _ = _abstract(config)

    def module_of(params):
        return nnx.merge(graphdef, nnx.State(params if layout is None else layout.with_shardings(params)))

    def best(params, hidden, k):
        return module_of(params).predict_best(hidden, k)

    if isinstance(config, HybridConfig):
        cache_and_pass = _hybrid_fields(config, layout, module_of)
    elif isinstance(config, Seq2SeqConfig):
        cache_and_pass = _seq2seq_fields(config, module_of)
    elif isinstance(config, VisionLanguageConfig):
        cache_and_pass = _vision_fields(config, layout, module_of)
    elif isinstance(config, CaptionConfig):
        cache_and_pass = _caption_fields(config, module_of)
    else:
        cache_and_pass = _attention_fields(config, layout, module_of)
    return Model(
        best=best if layout is None and not config.same_bits else None,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        name=config.name,
        config=unsharded_config,
        mesh=mesh,
        over=over,
        **cache_and_pass,
        **embedding_and_head_fields(module_of, layout),
    )


def _attention_fields(config: Config, layout: Layout | None, module_of: Callable[[PyTree], Any]) -> dict[str, Any]:
    """Return the fields of a `Model` whose layers all attend: its cache, its pass and its capabilities."""

    form = gear_form(config)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.KVCache:
        c = config
        check_no_inputs(c.name, inputs)
        if form is not None:
            return gear_slots.init(
                batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.dtype, form, c.cache_bits
            )
        capacity = capacity if layout is None else layout.capacity(capacity)
        cache = kv.init(
            batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.cache_dtype or c.dtype, c.stacked,
            c.cache_lanes, c.cache_bits,
        )  # fmt: skip
        return cache if layout is None else jax.lax.with_sharding_constraint(cache, layout.cache(cache))

    def forward(
        params, tokens, cache, *, positions, mask, taps=(), earlier=None, layers=None, group=1, depth=None, run=None
    ):
        loop = functools.partial(run_layers, group=group, taps=taps) if depth is None else SkippingLayers(depth)
        return module_of(params)(
            tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier, layers=layers, layout=layout,
            run_layers=run or loop,
        )  # fmt: skip

    def queries(params, streams, positions):
        return module_of(params).queries(streams, positions)

    if form is not None:
        # Slots of compressed blocks cannot be removed, and their keys are not an array that a selection could read.
        return {
            "init_cache": init_cache,
            "forward": forward,
            "commit": gear_slots.commit,
            "capabilities": Capabilities(
                config.num_layers,
                taps=True,
                groups=None,
                tree_depth=form.block - 1,
                mixtures=True,
                streams=True,
                vectors=True,
            ),
            **kv_cache_functions(),
            "rewind": None,
            "axes": gear_slots.axes,
        }
    return {
        "init_cache": init_cache,
        "forward": forward,
        "commit": kv.commit if layout is None else layout.commit,
        "queries": queries if layout is None else None,
        "shardings": None if layout is None else layout.cache,
        "capabilities": Capabilities(
            config.num_layers,
            taps=True,
            layer_skipping=True,
            depth=True,
            groups=None,
            mixtures=True,
            streams=True,
            vectors=True,
        ),
        **kv_cache_functions(),
    }


def _hybrid_fields(config: HybridConfig, layout: Layout | None, module_of: Callable[[PyTree], Any]) -> dict[str, Any]:
    """Return the fields of a `Model` with layers of several kinds, which cannot skip layers.

    It can rewind if no layer is recurrent. A model whose layers have inputs of their own reads tokens only.
    """
    shardings = None if layout is None else functools.partial(hybrid_memory.shardings, layout)

    def init_cache(params, inputs, batch: int, capacity: int) -> hybrid_memory.HybridCache:
        check_no_inputs(config.name, inputs)
        cache = hybrid_memory.init_cache(config, batch, capacity if layout is None else layout.capacity(capacity))
        return cache if shardings is None else jax.lax.with_sharding_constraint(cache, shardings(cache))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        return module_of(params)(
            tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier, layout=layout
        )

    return {
        "init_cache": init_cache,
        "forward": forward,
        "commit": functools.partial(hybrid_memory.commit, layout=layout),
        "shardings": shardings,
        "rewind": None if config.recurs else hybrid_memory.rewind,
        "widen": hybrid_memory.widen,
        "insert": hybrid_memory.insert,
        "axes": hybrid_memory.axes,
        "capabilities": Capabilities(
            config.num_layers,
            taps=True,
            mixtures=True,
            streams=config.layer_inputs is None,
            vectors=config.layer_inputs is None,
            reads_in_order=config.recurs,
            shared_keys=config.shared_keys,
        ),
    }


def _seq2seq_fields(config: Seq2SeqConfig, module_of: Callable[[PyTree], Any]) -> dict[str, Any]:
    """Return the fields of a `Model` with an encoder.

    `init_cache` encodes its `inputs`, a `Source` or a `Spectrogram`, if they are not encoded yet.
    """

    def encode(params, inputs) -> EncodedInputs:
        seq2seq_memory.check_inputs(config, inputs)
        return module_of(params).encode(inputs)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.ConditionedCache:
        encoded = inputs if isinstance(inputs, EncodedInputs) else encode(params, inputs)
        seq2seq_memory.check_width(config, encoded)
        text = kv.init(
            batch, capacity, config.num_layers, config.num_heads, config.head_dim, config.cache_dtype or config.dtype,
            False, config.cache_lanes, config.cache_bits,
        )  # fmt: skip
        return kv.ConditionedCache(text, module_of(params).memory_of(encoded))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None):
        return module_of(params)(tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier)

    return {
        "init_cache": init_cache,
        "encode": None if config.shares_encoder else encode,
        "forward": forward,
        "pass_params": pass_params,
        **kv_cache_functions(),
        **conditioned_cache_functions(),
        "source": None if isinstance(config, WhisperConfig) else lambda cache: cache.memory.text,
        "capabilities": Capabilities(
            config.num_layers, taps=True, mixtures=True, streams=True, inputs=True, shares_encoder=config.shares_encoder
        ),
    }


def _vision_fields(
    config: VisionLanguageConfig, layout: Layout | None, module_of: Callable[[PyTree], Any]
) -> dict[str, Any]:
    """Return the fields of a `Model` that reads images. Its `inputs` are `Images`, or None for prompts without any."""
    text = _attention_fields(config, layout, module_of)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.ConditionedCache:
        vision_memory.check_fit(config, inputs)
        memory = None if inputs is None else module_of(params).encode(inputs, layout)
        return kv.ConditionedCache(text["init_cache"](params, None, batch, capacity), memory)

    def commit(cache: kv.ConditionedCache, pending: kv.Pending, path: Array, num_nodes: Array) -> kv.ConditionedCache:
        return cache._replace(text=text["commit"](cache.text, pending, path, num_nodes))

    def shardings(arrays: kv.ConditionedCache | kv.Pending) -> PyTree:
        assert layout is not None
        if not isinstance(arrays, kv.ConditionedCache):
            return layout.cache(arrays)
        return kv.ConditionedCache(layout.cache(arrays.text), jax.tree.map(layout.rows, arrays.memory))

    return text | {
        "init_cache": init_cache,
        "pass_params": vision_model.pass_params,
        **conditioned_cache_functions(),
        "commit": commit,
        "shardings": None if layout is None else shardings,
        "images": lambda cache: cache.memory,
        "queries": None if config.sections else text["queries"],
        "check_inputs": lambda inputs, tokens, lengths, _: vision_memory.check_places(config, inputs, tokens, lengths),
        "capabilities": text["capabilities"]._replace(
            inputs=True, needs_inputs=False, placeholder=config.image_token, sees_ahead=config.sees_ahead
        ),
    }


def _caption_fields(config: CaptionConfig, module_of: Callable[[PyTree], Any]) -> dict[str, Any]:
    """Return the fields of a `Model` whose prompts are captions. Its `inputs` are `Captions`."""
    text = _attention_fields(config, None, module_of)

    def init_cache(params, inputs, batch: int, capacity: int) -> kv.ConditionedCache:
        image_captions.check_captions(config, inputs)
        return kv.ConditionedCache(text["init_cache"](params, None, batch, capacity), module_of(params).encode(inputs))

    return text | {
        "init_cache": init_cache,
        "pass_params": image_captions.pass_params,
        **conditioned_cache_functions(),
        "queries": None,
        "check_inputs": lambda inputs, tokens, lengths, _: image_captions.check_placeholders(
            config, inputs, tokens, lengths
        ),
        "capabilities": text["capabilities"]._replace(inputs=True, placeholder=config.placeholder),
    }


def _reduce_model(model: Model) -> tuple:
    """Return the call that builds a model again, for pickles. Raises: UsageError for a sharded model."""
    if model.mesh is not None:
        raise UsageError(
            f"{model.name} is sharded over a mesh, which cannot be pickled; pickle the model that was loaded without "
            "one, and call specjax.shard afterwards"
        )
    arguments = model.config, None, model.over
    if type(model.config) in CONFIGS and model == make_model(*arguments):
        return make_model, arguments
    return Model, tuple(model)


copyreg.pickle(Model, _reduce_model)  # its functions are closures, which cannot be pickled


def kv_cache_fields(config: Config) -> dict[str, Any]:
    """Return the fields of `Model` that all models with a key/value cache share."""
    size = {"vocab_size": config.vocab_size, "max_positions": config.max_positions, "name": config.name}
    return {**size, **kv_cache_functions()}


def kv_cache_functions() -> dict[str, Any]:
    """Return the functions of a key/value cache that need no config."""
    return {"rewind": kv.rewind, "widen": kv.widen, "insert": kv.insert, "axes": kv.axes}


def conditioned_cache_functions() -> dict[str, Any]:
    """Return the functions of a key/value cache beside a fixed memory that differ from those without one."""
    return {"commit": kv.commit_text, "rewind": kv.rewind_text, "axes": kv.conditioned_axes}


def embedding_and_head_fields(module_of: Callable[[PyTree], Any], layout: Layout | None) -> dict[str, Any]:
    """Return the fields `embed`, `unembed` and `head` of a `Model` whose module is `module_of(params)`."""

    def embed(params, tokens):
        return module_of(params).embed_tokens(tokens, layout)

    def unembed(params, hidden):
        return module_of(params).predict(hidden, layout)

    def head(params, stream):
        module = module_of(params)
        return module.predict(module.norm(stream), layout)

    return {"embed": embed, "unembed": unembed, "head": head}


def check_no_inputs(name: str, inputs: PyTree) -> None:
    """Check that a model that reads tokens only gets no other inputs.

    Raises: UsageError if it does.
    """
    if inputs is not None:
        raise UsageError(f"the model {name} takes tokens only; leave inputs out, or choose a model that takes inputs")
