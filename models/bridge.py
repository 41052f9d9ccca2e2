"""From an NNX module to the pure functions of `specjax.Model`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from specjax.errors import UsageError
from specjax.models import cache as kv
from specjax.models.decoder import Decoder, DecoderConfig
from specjax.models.gemma3 import Gemma3Config
from specjax.models.layers import run_layers
from specjax.models.layout import Layout, axis_of_other_bits, spread
from specjax.models.llama import LlamaConfig
from specjax.types import Capabilities, Model, PyTree

CONFIGS = LlamaConfig, Gemma3Config
Config = DecoderConfig


def abstract_module(config: Config) -> nnx.Module:
    """The module of `config` with shapes for parameters; nothing is allocated."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


@functools.cache
def _abstract(config: Config):
    """(graphdef, pure dict of ShapeDtypeStructs) of the module of `config`."""
    graphdef, state = nnx.split(abstract_module(config))
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: Config) -> PyTree:
    """Shapes and dtypes of the parameters, as a nested dict of `jax.ShapeDtypeStruct`."""
    return _abstract(config)[1]


def init_params(config: Config, key) -> PyTree:
    """Random parameters, for tests and for training from scratch."""
    module = Decoder(config, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.split(module)[1])


def check_cache_dtype(cache_dtype: str | None, name: str = "cache_dtype") -> None:
    """Raises: UsageError, with the setting's name, for one that is not None or "int8"."""
    if cache_dtype not in (None, "int8"):
        raise UsageError(f'{name} must be "int8", or left out for that of the model, not "{cache_dtype}"')


def has_repeated_heads(config: Config, params: PyTree) -> bool:
    """Whether the parameters are not of the shapes that their config says: a mesh repeats some heads."""
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    return shapes(params) != shapes(abstract_params(config))


@functools.cache
def make_model(config: Config, mesh: Mesh | None = None, over: tuple[str, ...] | None = None) -> Model:
    """The `Model` of a config: the same object for equal arguments, so a second `decode` compiles nothing.

    With a mesh, the parameters are those of `specjax.shard`; `over` as there.

    Raises: UsageError for a `cache_dtype` other than None or "int8", and for a mesh that does not fit.
    """
    check_cache_dtype(config.cache_dtype)
    if config.same_bits and config.dtype != "bfloat16":
        raise UsageError(f'same_bits is of dtype "bfloat16", not "{config.dtype}"; choose that, or leave same_bits out')
    if config.same_bits and mesh is not None:
        axis = axis_of_other_bits({axis: mesh.shape.get(axis, 1) for axis in over or mesh.axis_names})
        if axis is not None:
            raise UsageError(
                f'same_bits is not promised where a mesh splits rows or slots; make its axis "{axis}" 1, or leave '
                "same_bits out"
            )
    whole = config
    layout = None
    if mesh is not None:
        config, layout = spread(config, mesh, over)
    graphdef, _ = _abstract(config)

    def begin(params, inputs, batch: int, capacity: int) -> kv.KVCache:
        c = config
        check_no_inputs(c.name, inputs)
        capacity = capacity if layout is None else layout.capacity(capacity)
        cache = kv.init(
            batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, c.cache_dtype or c.dtype, c.stacked,
            c.cache_lanes, c.cache_bits,
        )  # fmt: skip
        return cache if layout is None else jax.lax.with_sharding_constraint(cache, layout.cache(cache))

    def forward(params, tokens, cache, *, positions, mask, taps=(), earlier=None, layers=None, group=1, run=None):
        module = nnx.merge(graphdef, nnx.State(params))
        return module(
            tokens, cache, positions=positions, mask=mask, taps=taps, earlier=earlier, layers=layers, layout=layout,
            run_layers=run or functools.partial(run_layers, group=group),
        )  # fmt: skip

    return Model(
        begin=begin,
        forward=forward,
        commit=kv.commit if layout is None else layout.commit,
        shardings=None if layout is None else layout.cache,
        config=whole,
        mesh=mesh,
        over=over,
        capabilities=Capabilities(
            config.num_layers,
            taps=True,
            layer_skipping=True,
            groups=None,
            mixtures=True,
            streams=True,
            vectors=True,
        ),
        **of_attention(config),
        **outside_of_layers(lambda params: nnx.merge(graphdef, nnx.State(params)), layout),
    )


def of_attention(config: Config) -> dict[str, Any]:
    """The fields of a `Model` that all with a key/value cache share."""
    return {
        "vocab_size": config.vocab_size,
        "max_positions": config.max_positions,
        "name": config.name,
        "rewind": kv.rewind,
        "widen": kv.widen,
        "insert": kv.insert,
        "axes": kv.axes,
    }


def outside_of_layers(module_of: Callable[[PyTree], Any], layout: Layout | None) -> dict[str, Any]:
    """`embed`, `unembed` and `head` of a `Model` whose module is `module_of(params)`."""

    def embed(params, tokens):
        return module_of(params).embedded(tokens, layout)

    def unembed(params, hidden):
        return module_of(params).predict(hidden, layout)

    def head(params, stream):
        module = module_of(params)
        return module.predict(module.norm(stream), layout)

    return {"embed": embed, "unembed": unembed, "head": head}


def check_no_inputs(name: str, inputs: PyTree) -> None:
    """Raises: UsageError if a model that reads tokens only is given something else."""
    if inputs is not None:
        raise UsageError(f"the model {name} reads nothing besides tokens; leave inputs out, or choose one that does")
