"""Groups of experts for the devices of a mesh, and tables that predict the device of a token.

Speculative MoE, arXiv 2503.04398. Tokens and experts are clustered together by the experts that each token chose in
texts. Each group of experts is on one device of the mesh axis "expert". A row is then sent to the device that probably
has most of its experts, before its router runs (`specjax.models.experts.shuffling`).

Rule: alternate two steps. Each token takes the device with the largest share of its choices, less a price of the
device's load. Experts swap places in pairs while a swap puts more choices on the devices of their tokens. The price and
the number of experts per device keep devices equally busy.
Guarantee: exact. Experts and rows of the router move together, and tables only choose where a row is computed.
Deviations: the clustering is per layer. A confidence is a frequency with one added count per device.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.files.atomic import write_atomic
from specjax.files.untrusted import check_file, guarded_read
from specjax.models.experts.counting import mixture_layers
from specjax.models.experts.sizes import TokenShuffling
from specjax.models.storage.schemes import EXPERTS
from specjax.numerics.validation import check_integer, check_range
from specjax.parallel.expert_traces import ExpertTraces, mixture_config
from specjax.types import Array, PyTree, Target

FORMAT = "specjax.expert_groups.1"
MAX_DEVICES = 127
"""Largest number of devices, which tables store in int8."""


@dataclass(frozen=True)
class ExpertGroups:
    """Experts of each device, and the predicted device of a row, for the L layers with a mixture of experts.

    G devices have E / G experts each.
    """

    orders: np.ndarray  # int32[L, E], the expert at each place; device g has the places from g E / G
    tokens: np.ndarray  # int8[L, V], the device of each token id
    token_confidence: np.ndarray  # float16[L, V]; 0: the token was not seen
    history: np.ndarray  # int8[L, G, G], the device after those of the layer before the last one, and the last one
    history_confidence: np.ndarray  # float16[L, G, G]
    hit_rate: float  # share of choices of experts that are on the predicted device, in the texts of the traces
    remote: float  # mean number of other devices that have an expert of a row

    @property
    def devices(self) -> int:
        """Return the number of devices."""
        return self.history.shape[-1]

    def save(self, path: str | Path) -> None:
        """Write the groups to one file, in the format of `numpy.savez`."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, format=np.array(FORMAT), **dataclasses.asdict(self))
        write_atomic(Path(path), buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> ExpertGroups:
        """Read the file of `save`. Raises: UsageError for a missing file, or one with other contents."""
        names = [field.name for field in dataclasses.fields(cls)]
        with guarded_read(path):
            check_file(path)
            with np.load(path, allow_pickle=False) as file:
                if str(file["format"]) != FORMAT:
                    raise UsageError(f"{path} has no expert groups; write them with `specjax group-experts`")
                arrays: dict[str, Any] = {name: file[name] for name in names}
            numbers: dict[str, Any] = {name: float(arrays[name]) for name in ("hit_rate", "remote")}
        groups = cls(**arrays | numbers)
        _check_tables(groups, path)
        return groups


def _check_tables(groups: ExpertGroups, path: str | Path) -> None:
    """Check tables from a file. Raises: UsageError for a wrong dtype or shape, or a number out of range."""
    orders, shapes_fit = groups.orders, groups.orders.ndim == groups.tokens.ndim == 2 and groups.history.ndim == 3
    layers, devices = (len(orders), groups.devices) if shapes_fit else (0, 0)
    confidences = groups.token_confidence, groups.history_confidence
    is_right = (
        layers > 0
        and 1 <= devices <= MAX_DEVICES
        and (orders.dtype, groups.tokens.dtype, groups.history.dtype) == (np.int32, np.int8, np.int8)
        and all(table.dtype == np.float16 for table in confidences)
        and groups.history.shape == groups.history_confidence.shape == (layers, devices, devices)
        and groups.tokens.shape == groups.token_confidence.shape
        and len(groups.tokens) == layers
        and orders.shape[1] % devices == 0
        and np.array_equal(np.sort(orders, -1), np.broadcast_to(np.arange(orders.shape[1]), orders.shape))
        and all(((table >= 0) & (table < devices)).all() for table in (groups.tokens, groups.history))
        and all(((table >= 0) & (table <= 1)).all() for table in confidences)
        and 0 <= groups.hit_rate <= 1
        and 0 <= groups.remote <= devices
    )
    if not is_right:
        raise UsageError(f"{path} has expert groups with damaged tables; write it again with `specjax group-experts`")


def cluster_experts(traces: ExpertTraces, devices: int, *, seed: int = 0, balance: float = 0.1) -> ExpertGroups:
    """Cluster tokens and experts into groups, one per device.

    Args:
      traces: result of `trace_experts`.
      devices: G, the size of the mesh axis "expert".
      seed: random seed of the swaps.
      balance: weight of equal loads of devices against choices on the right device.

    Raises: UsageError if the devices do not divide the experts, for a negative seed or balance, or for empty traces.
    """
    count = traces.num_experts
    check_integer("devices", devices, maximum=MAX_DEVICES)
    check_integer("seed", seed, minimum=0)
    check_range("balance", balance, lambda x: (x >= 0) & np.isfinite(x), "a number of at least 0")
    if count % devices:
        raise UsageError(
            f"{devices} devices cannot have equal parts of {count} experts; use a divisor of {count} from 1 to "
            f"{MAX_DEVICES}"
        )
    if len(traces.tokens) == 0:
        raise UsageError("the traces have no tokens; give texts with at least one token")
    rng = np.random.default_rng(seed)
    ids, numbers = np.unique(traces.tokens, return_inverse=True)
    layers = len(traces.experts)
    orders = np.zeros((layers, count), np.int32)
    tokens = np.tile((np.arange(traces.vocab_size) % devices).astype(np.int8), (layers, 1))
    confidence = np.zeros(tokens.shape, np.float16)
    shares = np.zeros((layers, len(traces.tokens), devices), np.int16)  # choices of each row on each device
    for layer, choices in enumerate(traces.experts):
        counts = np.zeros((len(ids), count))
        np.add.at(counts, (numbers[:, None], choices), 1)
        group, device = _co_cluster(counts, devices, rng, balance)
        orders[layer] = np.argsort(group, kind="stable")
        of_token = counts @ np.eye(devices)[group]
        tokens[layer, ids] = device
        confidence[layer, ids] = _smoothed(of_token[np.arange(len(ids)), device], of_token.sum(-1), devices)
        np.add.at(shares[layer], (np.arange(len(traces.tokens))[:, None], group[choices]), 1)
    history, history_confidence = _history_tables(shares)
    groups = ExpertGroups(orders, tokens, confidence, history, history_confidence, 0.0, 0.0)
    hit_rate, remote = _rates(groups, traces.tokens, shares)
    return dataclasses.replace(groups, hit_rate=hit_rate, remote=remote)


def _smoothed(hits: np.ndarray, total: np.ndarray, devices: int) -> np.ndarray:
    """Return frequencies with one added count per device, so that a device which was seen once is not certain."""
    return (hits + 1) / (total + devices)


def _co_cluster(counts: np.ndarray, devices: int, rng, balance: float) -> tuple[np.ndarray, np.ndarray]:
    """Cluster tokens and experts by counts float64[U, E]. Return the device int64[E] of experts and int64[U] of tokens.

    The best of two starts is returned: neighbours by common tokens, and a random permutation.
    """
    num_experts = counts.shape[1]
    starts = _neighbours(counts, devices), rng.permutation(np.arange(num_experts) % devices)
    best_score, best = -np.inf, None
    for group in starts:
        for _ in range(20):
            device = _tokens_to_devices(counts, group, devices, balance)
            score = _score(counts, group, device, devices, balance)
            if score <= best_score:
                break
            best_score, best = score, (group, device)
            group = _swap_experts(counts, group, device, devices, rng, balance)
    assert best is not None
    return best


def _score(counts: np.ndarray, group, device, devices: int, balance: float) -> float:
    """Return the share of choices on the right device, less the weighted variance of the loads of devices."""
    of_token = counts @ np.eye(devices)[group]
    loads = of_token.sum(0) * devices / of_token.sum()
    return of_token[np.arange(len(counts)), device].sum() / of_token.sum() - balance * float(np.var(loads))


def _neighbours(counts: np.ndarray, devices: int) -> np.ndarray:
    """Return groups of experts that have tokens in common. Each group begins with the busiest expert that is left."""
    scaled = counts / np.sqrt(np.maximum(counts.sum(-1, keepdims=True), 1))
    affinity = scaled.T @ scaled
    group = np.full(counts.shape[1], -1)
    for device in range(devices):
        members = [int(np.argmax(np.where(group < 0, counts.sum(0), -1.0)))]
        group[members[0]] = device
        while len(members) < len(group) // devices:
            members.append(int(np.argmax(np.where(group < 0, affinity[members].sum(0), -1.0))))
            group[members[-1]] = device
    return group


def _tokens_to_devices(counts: np.ndarray, group, devices: int, balance: float) -> np.ndarray:
    """Return the device int64[U] with the largest share of a token's choices, less the price of the device's load."""
    of_token = counts @ np.eye(devices)[group]
    total = of_token.sum(-1, keepdims=True)
    price = np.zeros(devices)
    for _ in range(10):
        device = np.argmax(of_token / total - price, -1)
        loads = np.bincount(device, total[:, 0], devices) * devices / total.sum()
        price += 0.1 * balance * (loads - 1)
    return np.argmax(of_token / total - price, -1)


def _swap_experts(counts: np.ndarray, group, device, devices: int, rng, balance: float) -> np.ndarray:
    """Return groups of equal size after random swaps of two experts, until no swap improves the score."""
    group, total, load = group.copy(), counts.sum(), counts.sum(0) / counts.sum() * devices
    affinity = np.stack([counts[device == g].sum(0) for g in range(devices)], -1) / total  # float64[E, G]
    index = np.arange(len(group))
    for _ in range(50 * len(group)):
        across = affinity[:, group]  # of expert e on the device of expert f
        gain = across + across.T - affinity[index, group][:, None] - affinity[index, group][None]
        loads = np.bincount(group, load, devices)[group]
        change = load[:, None] - load[None]  # load that leaves the device of e for that of f
        gain -= balance * (2 * change**2 + 2 * change * (loads[None] - loads[:, None])) / devices
        gain[group[:, None] == group[None]] = 0
        improving = np.argwhere(gain > 1e-12)
        if len(improving) == 0:
            break
        first, second = improving[rng.integers(len(improving))]
        group[first], group[second] = group[second], group[first]
    return group


def _history_tables(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the likeliest device after two devices, and its confidence, by shares int16[L, N, G] of devices."""
    layers, _, devices = shares.shape
    main = np.argmax(shares, -1)  # int64[L, N]
    tables = np.zeros((layers, devices, devices), np.int8)
    confidence = np.zeros(tables.shape, np.float16)
    for layer in range(2, layers):
        sums = np.zeros((devices, devices, devices))
        np.add.at(sums, (main[layer - 2], main[layer - 1]), shares[layer])
        tables[layer] = np.argmax(sums, -1)
        confidence[layer] = _smoothed(sums.max(-1), sums.sum(-1), devices) * (sums.sum(-1) > 0)
    return tables, confidence


def _rates(groups: ExpertGroups, tokens: np.ndarray, shares: np.ndarray) -> tuple[float, float]:
    """Return the hit rate and the mean number of other devices per row, with predictions of both tables."""
    main, rows = np.argmax(shares, -1), np.arange(len(tokens))
    hits, remote = 0, 0
    for layer, share in enumerate(shares):
        device, sure = groups.tokens[layer, tokens], groups.token_confidence[layer, tokens]
        if layer >= 2:
            pair = main[layer - 2], main[layer - 1]
            is_surer = groups.history_confidence[layer][pair] > sure
            device = np.where(is_surer, groups.history[layer][pair], device)
        hits += share[rows, device].sum()
        remote += (share > 0).sum() - (share[rows, device] > 0).sum()
    return float(hits / shares.sum()), float(remote / (len(shares) * len(tokens)))


def group_experts(target: Target, groups: ExpertGroups) -> Target:
    """Return the target with the experts of each device side by side, and with the tables of the groups.

    Its outputs are those of the target. On a mesh whose axis "expert" has `groups.devices` parts, each device then
    computes the rows that the tables send to it. On other meshes the tables are not used.

    Args:
      target: a mixture of experts from `specjax.models`, before `specjax.shard`.
      groups: result of `cluster_experts`, or of `ExpertGroups.load`.

    Raises: UsageError if the groups are those of another model, or if the target is sharded or has groups already.
    """
    from specjax.models import make_model

    config = mixture_config(target)
    layers = mixture_layers(config)
    expected = len(layers), config.experts.num_experts, config.vocab_size
    size = (*groups.orders.shape, groups.tokens.shape[1])
    if size != expected:
        raise UsageError(
            f"the groups have {size[0]} layers of {size[1]} experts and {size[2]} tokens, but {config.name} has "
            f"{expected[0]}, {expected[1]} and {expected[2]}; write groups of this model with `specjax group-experts`"
        )

    def grouped(feed: PyTree, numbers: list[int] | int) -> PyTree:
        places = np.array([layers.index(n) for n in numbers]) if isinstance(numbers, list) else layers.index(numbers)
        order = jnp.asarray(groups.orders[places])
        # Routers that choose groups of neighbours read the first places of their experts.
        of_router = {"order": order} if config.experts.routing.num_groups > 1 else {}
        tables = {
            "token_device": groups.tokens[places],
            "token_confidence": groups.token_confidence[places],
            "device": groups.history[places],
            "confidence": groups.history_confidence[places],
        }
        router = _permute(feed["router"], order) | of_router
        experts = {name: _permute(feed[name], order) for name in EXPERTS}
        return feed | experts | {"router": router, "tables": jax.tree.map(jnp.asarray, tables)}

    params = target.params | {"layers": _map_mixtures(grouped, target.params["layers"], config)}
    shuffling = TokenShuffling(groups.devices, config.vocab_size, round(groups.remote, 3))
    config = dataclasses.replace(config, experts=config.experts._replace(shuffling=shuffling))
    return dataclasses.replace(target, model=make_model(config), params=params)


def _map_mixtures(change: Callable[[PyTree, Any], PyTree], layers: PyTree, config: Any) -> PyTree:
    """Apply `change(parameters, number)` to the mixture of each layer. Stacked layers have a list of numbers."""

    def of_layer(parameters: PyTree, numbers: list[int] | int) -> PyTree:
        has_mixture = "expert_gate" in parameters.get("mlp", {})
        return parameters | {"mlp": change(parameters["mlp"], numbers)} if has_mixture else parameters

    if not config.stacked:
        return {layer: of_layer(parameters, layer) for layer, parameters in layers.items()}
    if "mlp" in layers:
        return of_layer(layers, list(range(config.num_layers)))
    numbers = lambda member: list(range(member, config.num_layers, config.period))
    return {member: of_layer(parameters, numbers(member)) for member, parameters in layers.items()}


def _permute(parameters: PyTree, order: Array) -> PyTree:
    """Permute arrays [E, ...] by order int32[E], or those of stacked layers [n, E, ...] by int32[n, E]."""
    if order.ndim == 1:
        return jax.tree.map(lambda leaf: leaf[order], parameters)
    return jax.tree.map(lambda leaf: jax.vmap(lambda part, order: part[order])(leaf, order), parameters)
