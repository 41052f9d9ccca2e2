"""What a head begins with: random parameters, or as much of the target as it has room for.

A head that begins with the target's own last layers, norm and output has hardly anything to learn of words, only how
its inputs are to be put together; with a few hundred thousand tokens to learn from that is most of what counts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import UsageError
from specjax.models.bridge import has_repeated_heads
from specjax.models.heads.contract import DraftHead
from specjax.models.heads.kinds import init_head
from specjax.training.data.vocabulary import NAME, checked_ids, place_of
from specjax.types import PyTree, Target

LAYER = ("attention", "mlp", "attention_norm", "mlp_norm")


def new_head(
    kind: str, config: Any, target: Target, key, *, ids: np.ndarray | None = None, random: bool = False,
    other: PyTree | None = None,
) -> DraftHead:  # fmt: skip
    """A head to be trained.

    Args:
      ids: int64[size], ascending, what it is to draft if it has a vocabulary of its own; None: the lowest.
      random: leave the parameters as their initial distributions draw them; else the target's stand where they fit.
      other: parameters of another head, of any kind, which stand where they fit in place of these.

    Raises: UsageError for ids that are not those of such a head, for a target over a mesh that repeats some of its
      heads, of which nothing would fit, or if no matrix of `other` fits.
    """
    if not random:
        check_whole(target)
    head = init_head(kind, config, key)
    params = head.params
    if NAME in params:
        size, vocab = int(jnp.max(params[NAME]["place"])), target.model.vocab_size
        ids = np.arange(size) if ids is None else checked_ids(ids, size, vocab)
        params = params | {NAME: {"place": place_of(ids, vocab)}}
    else:
        ids = None
    if not random:
        params = _from_target(params, config, target, ids)
    return DraftHead(head.head, params if other is None else _from_head(params, other))


def _from_head(params: dict, other: PyTree) -> dict:
    """With what fits of another head: that of the same name and shape."""
    share_of(params, other)
    return _fitted(params, _taken(params, other))


def share_of(params: PyTree, other: PyTree) -> float:
    """How much of a head's parameters, which may be shapes, fits of another's.

    Raises: UsageError if no matrix does; norms are of one width in many heads.
    """
    shapes = {path: x.shape for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    found = jax.tree_util.tree_flatten_with_path(_taken(params, other))[0]
    fits = [x for path, x in found if shapes.get(path) == x.shape]
    if not any(x.ndim > 1 for x in fits):
        raise UsageError("no matrix of the head that it is to begin with has its names and shapes; choose another")
    return sum(x.size for x in fits) / sum(x.size for x in jax.tree.leaves(params))


OUTPUT = NAME, "head_down", "head"
"""What belongs together: which tokens, and what says how likely they are."""


def _taken(params: PyTree, other: PyTree) -> PyTree:
    """Of another head all, or all but its output where that does not fit as a whole."""
    shapes = lambda of: jax.tree.map(jnp.shape, [of.get(name) for name in OUTPUT])
    if shapes(params) == shapes(other):
        return other
    return {name: part for name, part in other.items() if name not in OUTPUT}


def check_whole(target: Target) -> None:
    """Raises: UsageError for a target over a mesh that repeats some of its heads."""
    model: Any = target.model
    if model.mesh is not None and has_repeated_heads(model.config, target.params):
        raise UsageError(
            f"the mesh repeats key/value heads of {target.model.name}, so a head cannot begin with them; split the "
            "weights over fewer devices (--model), or begin at random (--start random)"
        )


def _from_target(params: dict, config: Any, target: Target, ids: np.ndarray | None) -> dict:
    of_target: Any = target.params
    if not isinstance(of_target, dict) or "layers" not in of_target:
        return params
    layers = _layers(of_target["layers"])
    params = dict(params)
    if "norm" in params and "norm" in of_target:
        params["norm"] = _fitted(params["norm"], of_target["norm"])
    if "embed" in params and "embed" in of_target:
        params["embed"] = _fitted(params["embed"], of_target["embed"])
    table = of_target.get("head") or of_target.get("embed")
    if table is not None:
        rows = table["weight"] if ids is None else table["weight"][jnp.asarray(ids)]
        params |= _outputs(params, rows)
    if "head_norm" in params and "norm" in of_target:
        params["head_norm"] = _fitted(params["head_norm"], of_target["norm"])
    if "attention" in params.get("first", {}):
        params["first"] = _joined_layer(params["first"], layers[-1], config.layer)
    if "prefix" in params:
        params["prefix"] = _layer(params["prefix"], layers[-1])
    for name in ("others", "stack", "layers"):
        if name in params:
            own = params[name]
            last = layers[-len(own) :] if len(own) <= len(layers) else layers
            params[name] = own | {
                key: _layer(part, source)
                for (key, part), source in zip(sorted(own.items(), key=lambda item: int(item[0])), last, strict=False)
            }
    if "fc" in params:
        params["fc"] = _last_input(params["fc"])
    return params


def _outputs(params: dict, rows: Any) -> dict:
    """What of a head begins as the target's output, its rows: an output, or one for each depth, or a table."""
    found: dict[str, Any] = {}
    if "head" in params:
        whole = {"head": {"weight": rows}}
        of_all = _of_low_rank(rows, len(params["head_down"]["weight"])) if "head_down" in params else whole
        found |= {name: _fitted(params[name], value) for name, value in of_all.items()}
    if "branches" in params:  # Medusa's and Hydra's, whose new blocks add nothing to the feature
        found["branches"] = {i: _fitted(one, {"head": {"weight": rows}}) for i, one in params["branches"].items()}
    if "trigram" in params:  # Chimera's read the feature and what its layers say side by side
        both = {"weight": jnp.concatenate([rows, rows], 1)}
        found["heads"] = {i: _fitted(one, both) for i, one in params["heads"].items()}
    if "next_gate" in params and "embed" in params:  # of Clover-2, whose authors take the output for its table
        found["embed"] = _fitted(params["embed"], {"weight": rows})
    return found


def _of_low_rank(rows: Any, rank: int) -> dict:
    """The two matrices of a head whose product is nearest to these rows, in the mean of squares.

    By the eigenvectors of rows' rows, of the width alone: a vocabulary is long.
    """
    rows = jnp.asarray(rows, jnp.float32)
    _, vectors = jnp.linalg.eigh(rows.T @ rows)
    down = vectors[:, ::-1][:, :rank].T
    return {"head_down": {"weight": down}, "head": {"weight": rows @ down.T}}


def _layers(layers: Any) -> list[dict]:
    """One dict a layer, of a stack or of a list."""
    if all(str(key).isdigit() for key in layers):
        return [layers[key] for key in sorted(layers, key=int)]
    count = len(jax.tree.leaves(layers)[0])
    return [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(count)]


def _fitted(own: PyTree, source: PyTree) -> PyTree:
    """`source` where it has the shape of `own`, in its dtype."""
    known = dict(jax.tree_util.tree_flatten_with_path(source)[0])

    def one(path, x):
        found = known.get(path)
        return found.astype(x.dtype) if found is not None and found.shape == x.shape else x

    return jax.tree_util.tree_map_with_path(one, own)


def _layer(own: dict, source: dict) -> dict:
    return own | {name: _fitted(own[name], source[name]) for name in LAYER if name in own and name in source}


SELF = 1.5
"""How strongly a place finds its own token. After one pass over 22,415 tokens of SmolLM2's answers the first draft was
right at 18.4 % of the places of texts held out, and at 16.1 % where this half was small and random."""


def _joined_layer(own: dict, source: dict, config: Any) -> dict:
    """EAGLE-3's layer, whose attention reads an embedding and a state side by side. Of the state it is the target's.

    Of the embedding, queries and keys are one random projection: a place attends to itself and to where its token stood
    before, and so the token, which says most of what comes next, is in the sum from the first step on.
    """
    pairs = {"mlp": "mlp", "mlp_norm": "mlp_norm", "state_norm": "attention_norm"}
    own = own | {
        name: _fitted(own[name], source[its]) for name, its in pairs.items() if name in own and its in source
    }  # OLMo: no norms
    attention = dict(own["attention"])
    attention["o"] = _fitted(attention["o"], source["attention"]["o"])
    width = source["attention"]["k"]["weight"].shape[1]
    key, value = (2**0.5 * attention[name]["weight"][:, :width] for name in ("k", "v"))  # as of an input of this width
    heads = key.reshape(config.num_kv_heads, 1, config.head_dim, width)
    query = jnp.repeat(heads, config.num_heads // config.num_kv_heads, 1).reshape(-1, width)
    for name, half in (("q", SELF * query), ("k", SELF * key), ("v", value)):
        weight, found = attention[name]["weight"], source["attention"][name]["weight"]
        if weight.shape == (found.shape[0], 2 * width):
            joined = jnp.concatenate([half, found.astype(weight.dtype)], 1)
            attention[name] = attention[name] | {"weight": joined}
    return own | {"attention": attention}


def _last_input(fc: dict) -> dict:
    """A layer that joins several streams, which at first lets the last of them through."""
    weight = fc["weight"]
    out, inputs = weight.shape
    if inputs % out:
        return fc
    last = jnp.arange(inputs) >= inputs - out
    eye = jnp.tile(jnp.eye(out, dtype=weight.dtype), (1, inputs // out))
    return fc | {"weight": jnp.where(last, eye, 0.1 * weight)}
