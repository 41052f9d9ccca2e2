"""Recorded distributions of a pair of models, at every position of texts that the target sampled.

A record is an npz file of plain arrays, without pickles. Its `format` is "specjax-distributions" and its `version` 1.
Each position stores the union of the `keep` most probable tokens of either model, in ascending order of id. Both
distributions are float32, restricted to these tokens and renormalised. `dropped` is the mass of the other tokens, which
bounds the error. With keep >= V the record is complete. (Full rows of a vocabulary of 151,936 take 1.2 MB per position.
The 1024 most probable tokens of either model take 16 kB and drop 4e-4.)
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.api import decode
from specjax.arrays.indexing import take_along
from specjax.arrays.modes import jit, with_standard_modes
from specjax.engine.prefill import prefill
from specjax.engine.step import buffer_size
from specjax.errors import UsageError
from specjax.numerics import sampling
from specjax.numerics.sampling import row_keys
from specjax.trees.autoregressive import autoregressive
from specjax.types import Array, Model, PyTree, Sampling, Target

FORMAT, VERSION = "specjax-distributions", 1
KEEP = 1024


class Record(NamedTuple):
    """R positions with M tokens each. Padding has token -1 and no mass in p or q, so it influences no rule."""

    tokens: np.ndarray  # int32[R, M], ascending ids
    p: np.ndarray  # float32[R, M], distribution of the target
    q: np.ndarray  # float32[R, M], distribution of the draft
    dropped: np.ndarray  # float32[R, 2], mass of target and draft outside of `tokens`
    prompt: np.ndarray  # int32[R], index of the prompt
    position: np.ndarray  # int32[R], index among the new tokens of that prompt
    about: dict  # target, draft, vocab_size, keep, temperature, top_k, top_p


@with_standard_modes
def record(
    target: Target,
    draft: Target,
    prompts: Sequence[Sequence[int]],
    *,
    key: Array,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | Sequence[int] = (),
    keep: int = KEEP,
    on_prompt: Callable[[Record], object] = lambda record: None,
) -> Record:
    """Sample a text of the target after each prompt, then run both models over it once.

    Args:
      prompts: token lists.
      key: one PRNG key. The text of prompt b equals that of `decode` with fold_in(key, b).
      max_new_tokens, temperature, top_k, top_p, eos: as in `decode`. Both distributions are warped in the same way.
      keep: largest number of tokens stored per distribution.
      on_prompt: called with the record of each prompt, so that a caller can save it before the next one starts.
        `join_records` joins several records.

    Raises: UsageError as in `decode`, for a temperature that is not above 0 (rules need random distributions to be
      compared), or for models with different vocabulary sizes.
    """
    if not temperature > 0:
        raise UsageError(f"temperature must be above 0 to compare rules, not {temperature:g}")
    sizes = target.model.vocab_size, draft.model.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"the target has {sizes[0]} token ids and the draft has {sizes[1]}; choose models of one family"
        )
    if not len(prompts):
        raise UsageError("prompts is empty; give at least one prompt")
    if keep < 1:
        raise UsageError(f"keep must be at least 1 token, not {keep}")
    keep = min(keep, sizes[0])
    capacity = min(target.model.max_positions, draft.model.max_positions)
    warping = Sampling(*(None if x is None else jnp.asarray(x) for x in (temperature, top_k, top_p)))
    keys = row_keys(key, len(prompts))
    about = {"target": target.model.name, "draft": draft.model.name, "vocab_size": sizes[0], "keep": keep}
    about |= {"temperature": float(temperature), "top_k": top_k, "top_p": top_p}
    parts: list[Record] = []
    for number, prompt in enumerate(prompts):
        result = decode(
            target, autoregressive(), [prompt], key=keys[number : number + 1], max_new_tokens=max_new_tokens,
            temperature=temperature, top_k=top_k, top_p=top_p, eos=eos, capacity=capacity,
        )  # fmt: skip
        new = result.to_lists()[0]
        distributions = _distributions_of_text(target, draft, prompt, new, max_new_tokens, warping, keep)
        tokens, p, q, dropped = _merge(*distributions)
        of_prompt, position = np.full(len(new), number, np.int32), np.arange(len(new), dtype=np.int32)
        parts.append(Record(tokens, p, q, dropped, of_prompt, position, about))
        on_prompt(parts[-1])
    return join_records(parts)


def join_records(parts: Sequence[Record]) -> Record:
    """Concatenate the positions of several records of one run."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in Record._fields[:-1]}
    return Record(**arrays, about=parts[0].about)


def _distributions_of_text(target, draft, prompt, new, max_new_tokens, warping, keep):
    """Return ids int32[T, 2 keep] and p, q float32[T, 2 keep] at these ids, for the T new tokens."""
    tokens = np.zeros((1, buffer_size(len(prompt), max_new_tokens, 1)), np.int32)
    tokens[0, : len(prompt) + len(new)] = [*prompt, *new]
    distributions = _distributions(
        target, draft, jnp.asarray(tokens), jnp.asarray([len(prompt)]), warping, max_new_tokens, keep
    )
    return [np.asarray(x)[: len(new)] for x in distributions]


@jit(static_argnames=("count", "keep"))
def _distributions(target: Target, draft: Target, tokens, length, warping: Sampling, count: int, keep: int):
    log_distributions = [
        _log_distribution(x.model, x.params, tokens, length, warping, count) for x in (target, draft)
    ]  # [count, V] each
    ids = jnp.concatenate([jax.lax.top_k(x, keep)[1] for x in log_distributions], 1)
    return ids, *(jnp.exp(take_along(x, ids, 1)) for x in log_distributions)


def _log_distribution(
    model: Model, params: PyTree, tokens: Array, length: Array, warping: Sampling, count: int
) -> Array:
    """Return float32[count, V], the warped log distributions of the `count` tokens after the first `length`."""
    cache = prefill(model, params, model.start_cache(params, None, length, tokens.shape[1]), tokens, length - 1)
    positions = length[:, None] - 1 + jnp.arange(count)
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    text = take_along(tokens, positions, 1)
    output, _ = model.forward(params, text, cache, positions=positions, mask=mask)
    return jax.nn.log_softmax(sampling.warp(output.logits, warping), -1)[0]


def _merge(ids: np.ndarray, p: np.ndarray, q: np.ndarray):
    """Return (tokens, p, q, dropped) of `Record`, [T, M], from ids [T, M] that may contain a token twice."""
    order = np.argsort(ids, 1, kind="stable")
    ids, p, q = (np.take_along_axis(x, order, 1) for x in (ids, p, q))
    is_padding = np.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0)))
    is_padding |= (p == 0) & (q == 0)
    last = np.argsort(is_padding, 1, kind="stable")  # padding goes to the end
    tokens, p, q = (
        np.take_along_axis(np.where(is_padding, x.dtype.type(empty), x), last, 1)
        for x, empty in ((ids, -1), (p, 0), (q, 0))
    )
    sums = [x.astype(np.float64).sum(1) for x in (p, q)]
    dropped = np.maximum(1 - np.stack(sums, 1), 0).astype(np.float32)
    p, q = ((x / mass[:, None]).astype(np.float32) for x, mass in zip((p, q), sums, strict=True))
    return tokens.astype(np.int32), p, q, dropped


def save_record(file: BinaryIO | Path | str, record: Record) -> None:
    """Write a record to a path, or to a binary file."""
    arrays = record._asdict() | {"about": json.dumps(record.about), "format": FORMAT, "version": VERSION}
    np.savez_compressed(file, **arrays)


def load_record(path: Path | str) -> Record:
    """Read a record from a file of `save_record`.

    Raises: UsageError for a file that is missing, truncated, of another format or of another version.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UsageError(f"the record {path} does not exist; check the path") from None
    except OSError as error:
        raise UsageError(f"cannot read the record {path} ({error.strerror or 'not an npz file'})") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, AttributeError, KeyError):
        raise UsageError(f"{path} is not a record, or it is truncated; write one with --save-record") from None
    if str(arrays.get("format")) != FORMAT:
        raise UsageError(f"{path} is not a record of distributions; write one with --save-record")
    if str(arrays.get("version")) != str(VERSION):
        raise UsageError(
            f"{path} is a record of version {arrays.get('version')}, but this specjax reads version {VERSION}; "
            "record it again"
        )
    try:
        about = json.loads(str(arrays["about"]))
        loaded = Record(**{name: arrays[name] for name in Record._fields if name != "about"}, about=about)
    except (KeyError, ValueError, RecursionError):
        raise UsageError(f"{path} is an incomplete record; record it again") from None
    if not _is_whole(loaded):
        raise UsageError(f"{path} contains damaged distributions; record it again")
    return loaded


def _is_whole(record: Record) -> bool:
    """Return True if the arrays fit each other and contain distributions."""
    shape = record.tokens.shape
    if len(shape) != 2 or not all(shape) or record.p.shape != shape or record.q.shape != shape:
        return False
    if record.dropped.shape != (shape[0], 2) or {record.prompt.shape, record.position.shape} != {shape[:1]}:
        return False
    if not isinstance(record.about, dict) or not all(x.dtype.kind == "f" for x in (record.p, record.q, record.dropped)):
        return False
    return all(bool(np.all(x >= 0) and np.all(np.abs(x.sum(1, dtype=np.float64) - 1) < 1e-3)) for x in record[1:3])
