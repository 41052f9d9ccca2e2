"""The mask token of heads that draft several tokens in one pass: its id in config.json, or that of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.errors import UsageError
from specjax.files.untrusted import read_json_object
from specjax.models.loading.families.config_fields import ROWS, ConfigFields
from specjax.models.loading.heads.checkpoint_contents import MASK, Contents

FIELDS = "mask_token_id", "pard_token", "ptd_token_id"
NAMES = "<|MASK|>", "<|mask|>", "<mask>", "[MASK]", "<MASK>"
"""Names of mask tokens in tokenizers that do not declare one. SGLang adds the first one."""
DECLARED = "mask_token"


def read_mask_token(contents: Contents, places: Sequence[ConfigFields], notes: list[str]) -> int:
    """Return the id of the mask token. It is 0 if the user sets `mask_token`, or if the mask has its own embedding.

    The first field in FIELDS counts, in the first of these places that has one, with a note if others differ. Without
    any, the head's or the target's tokenizer must have a mask token.

    Raises: UsageError if there is none.
    """
    for fields in places:
        fields.skip(*FIELDS, DECLARED)
    if "mask_token" in contents.changes or MASK in contents.tensors:
        return 0
    statements = {
        fields.prefix + name: fields.size(name, minimum=0, maximum=ROWS)
        for name in FIELDS
        for fields in places
        if fields.has(name)
    }
    if statements:
        (field, mask), *alternatives = statements.items()
        differing = [f"{other} {value}" for other, value in alternatives if value != mask]
        if differing:
            notes.append(f"{contents.config.where} has {', '.join(differing)}, and {field} {mask}, which is used")
        return mask
    names = [fields.text(DECLARED) for fields in places if fields.has(DECLARED)]
    tokenizers = {"its own": _tokens_of_folder(contents.folder), "the target's": _tokens_of(contents.tokenizer)}
    for owner, ids in tokenizers.items():
        token = next((ids[name] for name in (*names, DECLARED, *NAMES) if name in ids), None)
        if token is not None:
            notes.append(f"{contents.config.where} has no mask_token_id; assumed {token}, of {owner} tokenizer")
            return token
    raise UsageError(
        f"{contents.config.where} lacks the field mask_token_id, and no tokenizer has a mask token; set mask_token "
        "(--head-set mask_token=ID)"
    )


def _tokens_of(tokenizer: Any) -> dict[str, int]:
    """Return the ids of a tokenizer's tokens by name. DECLARED is the one that it declares as its mask."""
    if tokenizer is None:
        return {}
    ids = {token: i for i, token in enumerate(tokenizer.vocab)}
    mask = tokenizer.names.get(DECLARED)
    return ids | ({DECLARED: ids[mask]} if mask in ids else {})


def _tokens_of_folder(folder: Path) -> dict[str, int]:
    """Return the ids of the extra tokens in the tokenizer files of a head, like `_tokens_of`."""
    read = lambda name: read_json_object(folder / name) or {}
    config = read("tokenizer_config.json")
    extra = read("tokenizer.json").get("added_tokens")
    entries = [
        (x.get("content"), x.get("id")) for x in (extra if isinstance(extra, list) else ()) if isinstance(x, dict)
    ]
    decoder = config.get("added_tokens_decoder")
    for key, x in decoder.items() if isinstance(decoder, dict) else ():
        entries.append(
            (x.get("content") if isinstance(x, dict) else None, int(key) if key.isdecimal() and len(key) < 10 else None)
        )
    ids = {name: i for name, i in entries if isinstance(name, str) and type(i) is int and 0 <= i < ROWS}
    for source in (config, read("special_tokens_map.json")):
        mask = source.get(DECLARED)
        name = mask.get("content") if isinstance(mask, dict) else mask
        if isinstance(name, str) and name in ids:
            ids[DECLARED] = ids[name]
    return ids
