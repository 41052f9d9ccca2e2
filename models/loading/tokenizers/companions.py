"""The small files beside a tokenizer: names of its special tokens, tokens that were added to it, and chat templates.

The rules are those of `transformers`: tokenizer_config.json holds everything since its field `added_tokens_decoder`
exists. Folders without that field may have special_tokens_map.json and added_tokens.json too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import UsageError
from specjax.files.untrusted import quote, read_bytes, read_json_object
from specjax.models.loading.families.config_fields import ConfigFields
from specjax.models.loading.families.unread_fields import ANY, warn_of_unread
from specjax.models.loading.tokenizers.tokenizer import TextCodec

SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_TEMPLATE = "chat_template.json"
"""The file of older multimodal folders, whose tokenizers have no template of their own."""
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Fields with special tokens that have no name."""

CLASS_NAMES = {
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
}
"""Special tokens of a `tokenizer_class` whose folder does not name them. Llama's class has byte-level vocabularies too,
with other tokens."""


READ = ("added_tokens_decoder", "auto_map", "chat_template", "tokenizer_class", *LISTS)

HARMLESS = (
    # files and classes of other libraries
    "backend", "is_local", "local_files_only", "merges_file", "name_or_path", "processor_class",
    "special_tokens_map_file", "tokenizer_file", "use_fast", "vocab_file",
    # lengths and padding of batches, which the caller sets
    "max_length", "model_input_names", "model_max_length", "pad_to_multiple_of", "pad_token_type_id", "padding",
    "padding_side", "padding_strategy", "stride", "truncation", "truncation_side", "truncation_strategy",
    # cosmetics of decoded text, which specjax does not apply: its text is that of the tokens
    "clean_up_tokenization_spaces", "errors", "spaces_between_special_tokens",
    # rules that tokenizer.json and tokenizer.model state themselves
    "add_prefix_space", "legacy",
)  # fmt: skip

NEUTRAL = {
    "do_lower_case": False,
    "sp_model_kwargs": {},
    "split_special_tokens": False,
    "use_default_system_prompt": False,
}
"""Fields of tokenizer_config.json that change nothing with this value, although no code reads them."""


class AddedPiece(NamedTuple):
    """A token that is matched in the text before any merging."""

    piece: str
    id: int | None  # None: that of the vocabulary, or the next free one
    special: bool  # a control token, which decoded text omits
    left_strip: bool = False  # it removes the spaces before it
    right_strip: bool = False  # it removes the spaces after it
    normalized: bool = False  # it is matched in normalized text
    single_word: bool = False  # it is matched between other characters than letters only


class Companions(NamedTuple):
    """The contents of the files."""

    where: str  # the file that most of it is from, for errors
    settings: Mapping[str, Any]  # tokenizer_config.json
    special: ConfigFields  # special_tokens_map.json
    class_name: str  # class of the tokenizer, without the suffix of its fast form; "": not given
    names: Mapping[str, str]  # pieces of special tokens by role, such as "bos_token"
    added: tuple[AddedPiece, ...]

    def named(self, pieces: Collection[str], defaults: Mapping[str, str]) -> dict[str, str]:
        """Return the names with those of `defaults`, and of the class, that the files do not give or deny."""
        defaults = CLASS_NAMES.get(self.class_name, {}) | dict(defaults)
        return {k: v for k, v in defaults.items() if k not in self.settings and v in pieces} | dict(self.names)


def read_companions(folder: Path) -> Companions:
    """Read the files of a folder that name and add tokens. Raises: UsageError for entries that are no tokens."""
    settings = read_json_object(folder / SETTINGS) or {}
    where = str(folder / SETTINGS)
    special = read_json_object(folder / SPECIAL_TOKENS) or {}
    entries = settings.get("added_tokens_decoder")
    fields = {**special, **settings} if entries is not None else {**settings, **special}
    names = {key: text for key, value in fields.items() if key.endswith("_token") and (text := _text(value))}
    tokens = [token for name in LISTS for token in _tokens(fields.get(name))]
    control = {*names.values(), *filter(None, map(_text, tokens))}
    if entries is not None:
        added = list(_decoder_pieces(entries, control, where))
    else:
        added = list(_older_pieces(read_json_object(folder / ADDED_TOKENS) or {}, control, str(folder / ADDED_TOKENS)))
    present = {entry.piece for entry in added}
    for token in [*(fields[name] for name in names), *tokens]:
        entry = _piece(token, None, special=True)
        if entry is not None and entry.piece not in present:
            added.append(entry)
            present.add(entry.piece)
    special_fields = ConfigFields(special, str(folder / SPECIAL_TOKENS))
    return Companions(where, settings, special_fields, _class_name(settings), names, tuple(added))


def _class_name(settings: Mapping[str, Any]) -> str:
    name = settings.get("tokenizer_class")
    code = settings.get("auto_map")
    if name is None and isinstance(code, dict):  # "tokenization_x.XTokenizer", of code that is never run
        names = code.get("AutoTokenizer")
        name = str(names[0] if isinstance(names, list) and names else names).rpartition(".")[2]
    return name.removesuffix("Fast") if isinstance(name, str) else ""


def place_pieces(companions: Companions, ids: Mapping[str, int], rows: int | None) -> list[tuple[AddedPiece, int]]:
    """Return the added tokens with their ids.

    Args:
      ids: the vocabulary, to which new tokens are appended.
      rows: number of rows of the model's embedding; None: unknown. Tokens without a stated id need a row.

    Raises: UsageError for a token whose id belongs to another one or leaves a gap, and for a bos or eos without a row.
    """
    places: list[tuple[AddedPiece, int]] = []
    free = max(ids.values(), default=-1) + 1
    for entry in sorted(companions.added, key=lambda entry: (entry.id is None, entry.id or 0)):
        actual = ids.get(entry.piece, free)
        if entry.id not in (None, actual):
            problem = "is its id" if entry.piece in ids else "is the next free id"
            raise UsageError(
                f"{companions.where} gives the token {quote(entry.piece)} the id {entry.id}, but {actual} {problem} in "
                "the vocabulary; download the whole repository again"
            )
        if entry.piece not in ids:
            if entry.id is None and rows is not None and actual >= rows:
                if entry.piece in (companions.names.get("bos_token"), companions.names.get("eos_token")):
                    raise UsageError(
                        f"{companions.where} names the token {quote(entry.piece)}, which neither the vocabulary nor "
                        f"the model with its {rows} rows has; download the whole repository again"
                    )
                continue
            free += 1
        places.append((entry, actual))
    return places


def _tokens(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is stored as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _piece(token: Any, token_id: int | None, special: bool) -> AddedPiece | None:
    piece = _text(token)
    if piece is None:
        return None
    flags = token if isinstance(token, dict) else {}
    is_set = lambda name: flags.get(name) is True
    return AddedPiece(
        piece, token_id, special or is_set("special"), is_set("lstrip"), is_set("rstrip"), is_set("normalized"),
        is_set("single_word"),
    )  # fmt: skip


def _decoder_pieces(entries: Any, control: set[str], where: str) -> Iterator[AddedPiece]:
    """Yield the entries of `added_tokens_decoder`, an object of tokens by id."""
    for key, token in entries.items() if isinstance(entries, dict) else [(None, None)]:
        entry = None
        if isinstance(key, str) and key.isdecimal() and len(key) < 10:
            entry = _piece(token, int(key), special=_text(token) in control)
        if entry is None:
            raise UsageError(
                f"{where} has added_tokens_decoder {quote(entries)}, which must be an object of tokens by id"
            )
        yield entry


def _older_pieces(entries: Mapping[str, Any], control: set[str], where: str) -> Iterator[AddedPiece]:
    """Yield the entries of added_tokens.json, an object of ids by token."""
    for piece, token_id in entries.items():
        if not piece or type(token_id) is not int or not 0 <= token_id < 1 << 30:
            raise UsageError(f"{where} gives the token {quote(piece)} the id {quote(token_id)}, which is none")
        yield AddedPiece(piece, token_id, piece in control, normalized=piece not in control)


def read_templates(folder: Path, settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the default chat template, and the other templates by name.

    Files in Jinja take precedence over the field of tokenizer_config.json, and that over PROCESSOR_TEMPLATE.
    A default that is no text is returned as it is, and `Tokenizer.chat` refuses it.
    """
    files = {"default": folder / TEMPLATE_FILE} if (folder / TEMPLATE_FILE).exists() else {}
    files |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if files:
        named = {name: _template_text(file) for name, file in files.items()}
        return named.pop("default", None), named
    template = settings.get("chat_template")
    if template is None:
        template = (read_json_object(folder / PROCESSOR_TEMPLATE) or {}).get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        named = {entry["name"]: entry.get("template") for entry in entries}
    elif isinstance(template, dict):
        named = {name: text for name, text in template.items() if isinstance(name, str)}
    else:
        return template, {}
    default = named.pop("default", None)
    return (default, named) if named or default is not None else (template, {})


def _template_text(file: Path) -> Any:
    contents = read_bytes(file)
    try:
        return contents.decode()
    except UnicodeDecodeError:
        return contents


def warn_of_unread_settings(companions: Companions, codec: TextCodec) -> None:
    """Give a CheckpointWarning that names the fields of the small files that can change token ids."""
    fields = ConfigFields(companions.settings, companions.where)
    ends = _added_ends(codec) if companions.settings.keys() & {"add_bos_token", "add_eos_token"} else {}
    neutral = {**dict.fromkeys((*READ, *HARMLESS), ANY), **NEUTRAL, **_read_tokens(companions.settings), **ends}
    warn_of_unread(fields, 5, neutral)
    lists = {name: ANY for name in LISTS if isinstance(companions.special.value(name), list | dict)}
    warn_of_unread(companions.special.unrecorded(), 5, {**_read_tokens(companions.special.values), **lists})


def _read_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens with a name that `read_companions` reads. Others have no text."""
    names = (name for name in settings if name.endswith("_token") and not name.startswith("add_"))
    return {name: ANY for name in names if _text(settings[name]) or settings[name] in (None, "")}


def _added_ends(codec: TextCodec) -> dict[str, Any]:
    """Return whether the tokenizer adds bos and eos, under the names of the fields that ask for it."""
    with contextlib.suppress(UsageError):  # it fails on every text
        plain, full = codec.encode("a", False), codec.encode("a", True)
        extra = len(full) - len(plain)
        is_prefix = extra > 0 and full[:1] != plain[:1]
        return {"add_bos_token": is_prefix, "add_eos_token": extra > (1 if is_prefix else 0)}
    return {}
