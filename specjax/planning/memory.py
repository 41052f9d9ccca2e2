"""Memory of a decode on one device, from the shapes of its arrays, without a compilation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp

from specjax import parallel
from specjax.engine.prefill import CHUNK, wide_chunk
from specjax.engine.step import buffer_size
from specjax.files.libtpu import WIDE_VMEM
from specjax.models.heads.kinds import abstract_head
from specjax.numerics.global_arrays import with_shardings
from specjax.planning import denoising
from specjax.planning.abstract import cache_shapes, shard_bytes, spread, unsharded
from specjax.planning.inputs.topologies import describe_devices
from specjax.planning.traffic import bytes_per_token, fixed_bytes, pending_bytes
from specjax.planning.workload import Workload
from specjax.types import PyTree, Target

RESERVED = 0.025
"""Share of the memory that is left free for the program itself and for temporaries without a formula.

The largest of those that the TPU compiler reported are 0.39 GiB, in SmolLM2 in float32 with 8,000 tokens.
"""


@dataclass(frozen=True)
class Memory:
    """Bytes that a decode needs on one device, as a function of the slots of its cache and the nodes of its tree."""

    weights: int  # of the target and its module
    module: int  # of these, the weights of the module for multi-token prediction
    per_slot: float  # of the cache, all rows, with that of the module
    module_per_slot: float  # of these, the cache of the module
    states: int  # of the cache, all rows, at any length: those of recurrent layers
    per_node: float  # logits, twice in float32, and pending entries of the cache
    chunk: float  # activations of a chunk of the prompt, and its pending entries of the cache
    on_chip: int = 0  # on-chip memory of a TPU beside that of an operation

    def arrays_of_pass(self, nodes: int, more: float = 0.0) -> float:
        """Return the bytes of the temporary arrays of a pass over a tree, or over a chunk with `more` bytes.

        If all of them fit on the chip, they take no memory: a tiny model of 16 rows has 1.2 MiB of temporaries, where
        the shapes of its chunk take 16 MiB.
        """
        size = max(self.per_node * nodes, self.chunk + more)
        return 0.0 if size <= self.on_chip else size

    def total(self, slots: int, nodes: int) -> float:
        """Return the bytes of a decode with so many slots per row and nodes per pass."""
        return self.weights + self.states + self.per_slot * slots + self.arrays_of_pass(nodes)


def memory_of(work: Workload, target: Target) -> Memory:
    """Return the memory of a workload's decode, for the model of `target_of(work)`, with its own module if it has one.

    The cache of a module is that of one attention layer for each of its layers.
    """
    config, parts, chip = work.target, work.devices // work.data, work.topology.chip
    rows = -(-work.batch // work.data)
    cache = sharded_cache(target, work.batch)
    per_slot = bytes_per_token(target, work.batch, cache)
    pending = pending_bytes(target, work.batch)
    module, module_per_slot = 0, 0.0
    if work.head is not None:
        layers = spread_target(work, work.head.layer)
        module = shard_bytes(_module_params(work))
        module_per_slot = bytes_per_token(layers, work.batch, sharded_cache(layers, work.batch))
        pending += pending_bytes(layers, work.batch)
    size = chunk_tokens(work)
    # A recurrent model reads a text in another form, without the states after each token.
    of_chunk = 0.0 if target.model.capabilities.reads_in_order else size * pending
    inner = 2 * config.mlp_width + config.num_heads * config.head_dim
    item = jnp.dtype(config.dtype).itemsize
    return Memory(
        weights=shard_bytes(target.params) + module,
        module=module,
        per_slot=per_slot + module_per_slot,
        module_per_slot=module_per_slot,
        states=fixed_bytes(target, work.batch, cache),
        per_node=2 * 4 * rows * config.vocab_size / parts + pending,
        chunk=rows * size * (4 * config.width + inner / parts) * item + of_chunk,
        on_chip=chip.vmem_bytes - (WIDE_VMEM[chip.name] << 10) if chip.name in WIDE_VMEM else 0,
    )


def chunk_tokens(work: Workload) -> int:
    """Return the tokens per row of the largest pass over the prompts."""
    return wide_chunk(work.batch, work.platform) if work.reading is None else CHUNK


def target_of(work: Workload) -> Target:
    """Return the shapes of the workload's target. Several devices need the compiler, for the order of a slice."""
    return spread_target(work, work.target)


def spread_target(work: Workload, config: Any) -> Target:
    """Return the shapes of a model on the devices of a workload."""
    if work.devices == 1:
        return unsharded(config)
    return spread(config, work.mesh(describe_devices(work.topology)))


def sharded_cache(target: Target, batch: int) -> PyTree:
    """Return the shapes of a cache of 1,024 tokens, with the shardings of its model."""
    cache = cache_shapes(target, batch, 1024)
    return cache if target.model.shardings is None else with_shardings(cache, target.model.shardings(cache))


def _module_params(work: Workload) -> PyTree:
    """Return the shapes of the parameters of a workload's head on its devices."""
    head = abstract_head(work.method, work.head)
    if work.devices == 1:
        return head.params
    mesh = work.mesh(describe_devices(work.topology))
    return with_shardings(head.params, parallel.head_shardings(head, mesh))


def slots_of(work: Workload, context: int, nodes: int) -> int:
    """Return the slots per row of a cache for prompts of `context` tokens and passes over `nodes` nodes."""
    if work.reading is not None:
        return denoising.canvas_columns(dataclasses.replace(work, context=context), nodes)
    return buffer_size(context, work.max_new_tokens, nodes, work.target.max_positions)


class Sized(Protocol):
    """A sum of bytes of a decode, such as `Memory`."""

    def total(self, slots: int, nodes: int) -> float: ...


def longest_context(work: Workload, memory: Sized, nodes: int, room: float) -> int:
    """Return the tokens of the longest prompt with which a decode fits, by bisection; 0 if none does."""
    models = work.target, work.draft or work.target
    fits = lambda context: memory.total(slots_of(work, context, nodes), nodes) <= room
    low, high = 0, max(min(model.max_positions for model in models) - work.max_new_tokens, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def available_bytes(device_bytes: float) -> float:
    """Return the bytes of a device's memory that the arrays of a decode may take."""
    return device_bytes * (1 - RESERVED)
