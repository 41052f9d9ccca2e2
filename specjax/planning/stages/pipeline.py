"""Seconds of the attention stage and the feed-forward stage of a pass, together and on separate devices.

Step-3 is Large yet Affordable: Model-system Co-design for Cost-effective Decoding, StepFun (2025), arXiv 2507.19427.

All figures are sums over the layers. With r rows per attention device, T nodes per row, n nodes in a micro-batch, a
bandwidth BW and a peak of F FLOPs/s, a device takes

    attention      t_a = max(W_a / BW, 2 P_a r T / F) + r max(cache / BW, scores T / F) + 2 r states / BW
    feed-forward   t_f = max((W_f + touched(n) W_e) / BW, 2 (P_f + chosen P_e) n / F), divided by its devices
    transfer       t_c = n d bytes / (links BW of the links) per direction, over the smaller group of devices

A micro-batch of ceil(B / m) rows is in one stage at a time. With m of them, a step takes

    max(m p, t_a + t_f + 2 t_c),  p = max(t_a, t_f, t_c)

The second term is the way of one micro-batch through a layer, which more micro-batches hide. Together on A + F devices
a step takes t_a + t_f for B rows. There each device has all attention weights, some rows, and a part of the
feed-forward weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from specjax.costs.chips import Chip
from specjax.planning.stages.parts import StageParts


@dataclass(frozen=True)
class StageSplit:
    """A division of the devices, and the seconds of each stage in a step of all micro-batches."""

    attention_devices: int
    feed_devices: int
    micro_batches: int
    attention_seconds: float  # in which an attention device is busy
    feed_seconds: float  # in which a feed-forward device is busy
    transfer_seconds: float  # in which the links are busy, per direction
    period_seconds: float  # of one layer of one micro-batch, for the slowest stage
    step_seconds: float  # of all layers and micro-batches
    attention_bytes: int  # of weights and cache, per attention device
    feed_bytes: int  # of weights, per feed-forward device

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of the fuller device."""
        return max(self.attention_bytes, self.feed_bytes)


def attention_seconds(parts: StageParts, chip: Chip, rows: int, nodes: int) -> float:
    """Return the seconds in which one device computes the attention part for `rows` rows of `nodes` nodes each."""
    weights = _slower(parts, chip, parts.attention.bytes, 2.0 * parts.attention.params * rows * nodes)
    cached = parts.token_bytes * parts.context
    cache = _slower(parts, chip, rows * cached, rows * parts.score_flops * parts.context * nodes)
    return weights + cache + 2.0 * rows * parts.state_bytes / chip.hbm_bandwidth


def feed_seconds(parts: StageParts, chip: Chip, nodes: float) -> float:
    """Return the seconds in which one device computes the feed-forward part for `nodes` nodes of all rows."""
    return _slower(parts, chip, *_feed_work(parts, nodes))


def transfer_seconds(parts: StageParts, chip: Chip, nodes: int, devices: int) -> float:
    """Return the seconds in which `devices` devices send or receive the stream of `nodes` nodes, for all layers."""
    sent = nodes * parts.width * parts.item / (devices * chip.ring_links * chip.link_bandwidth)
    return parts.num_layers * (sent + chip.start_seconds + chip.hop_seconds)


def balance_nodes(parts: StageParts, chip: Chip) -> float:
    """Return the nodes of a pass whose feed-forward weights are read in the time of their products.

    With fewer nodes the weights are the limit, and with more nodes the products are.
    """
    low, high = 0.0, 1.0
    while not _is_compute_bound(parts, chip, high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_compute_bound(parts, chip, middle) else (middle, high)
    return high


def attention_bytes(parts: StageParts, rows: int, devices: int, slots: int) -> int:
    """Return the bytes of a device with all attention weights and the cache of `rows` rows of `slots` slots.

    The embedding and the output head are divided over the `devices` attention devices.
    """
    cache = rows * (slots * parts.token_bytes + parts.state_bytes)
    return math.ceil(parts.attention.bytes + cache + parts.outer / devices)


def feed_bytes(parts: StageParts, devices: int) -> int:
    """Return the bytes of a device with a part of the feed-forward weights."""
    return -(-(parts.feed.bytes + parts.experts.bytes) // devices)


def split_of(
    parts: StageParts, chip: Chip, devices: tuple[int, int], batch: int, nodes: int, micro_batches: int, slots: int
) -> StageSplit:
    """Return the seconds and bytes of a division of devices.

    Args:
      devices: number of attention devices and of feed-forward devices.
      batch, nodes: rows of a step, and nodes of each row.
      micro_batches: number of parts of the batch, which are in different stages at a time.
      slots: of the cache, per row.
    """
    attention, feed = devices
    rows = -(-batch // micro_batches)
    device_rows = -(-rows // attention)
    t_a = attention_seconds(parts, chip, device_rows, nodes)
    t_f = feed_seconds(parts, chip, rows * nodes) / feed
    t_c = transfer_seconds(parts, chip, rows * nodes, min(attention, feed))
    period = max(t_a, t_f, t_c)
    return StageSplit(
        attention_devices=attention,
        feed_devices=feed,
        micro_batches=micro_batches,
        attention_seconds=micro_batches * t_a,
        feed_seconds=micro_batches * t_f,
        transfer_seconds=micro_batches * t_c,
        period_seconds=period / parts.num_layers,
        step_seconds=max(micro_batches * period, t_a + t_f + 2 * t_c),
        attention_bytes=attention_bytes(parts, micro_batches * device_rows, attention, slots),
        feed_bytes=feed_bytes(parts, feed),
    )


def every_split(
    parts: StageParts, chip: Chip, devices: int, batch: int, nodes: int, micro_batches: Iterable[int], slots: int
) -> list[StageSplit]:
    """Return every division of `devices` devices with these numbers of micro-batches."""
    return [
        split_of(parts, chip, (attention, devices - attention), batch, nodes, count, slots)
        for count in micro_batches
        for attention in range(1, devices)
    ]


def _feed_work(parts: StageParts, nodes: float) -> tuple[float, float]:
    """Return the bytes and FLOPs of the feed-forward part for `nodes` nodes."""
    moved = parts.feed.bytes + parts.touched(nodes) * parts.experts.bytes
    return moved, 2.0 * nodes * (parts.feed.params + parts.chosen * parts.experts.params)


def _is_compute_bound(parts: StageParts, chip: Chip, nodes: float) -> bool:
    moved, flops = _feed_work(parts, nodes)
    return flops / _peak(parts, chip) >= moved / chip.hbm_bandwidth


def _slower(parts: StageParts, chip: Chip, moved: float, flops: float) -> float:
    """Return the seconds of the slower of moved bytes and FLOPs, which overlap."""
    return max(moved / chip.hbm_bandwidth, flops / _peak(parts, chip))


def _peak(parts: StageParts, chip: Chip) -> float:
    return chip.float32_flops if parts.is_float32 else chip.peak_flops
