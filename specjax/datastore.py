"""The former name of `specjax.retrieval.datastore`, until the next release."""

import warnings

from specjax.retrieval.datastore import (
    Datastore,
    Index,
    Match,
    Shard,
    build,
    check_tokenizer,
    continuations,
    fingerprint,
    from_documents,
    open_datastore,
    search,
)

__all__ = [
    "Datastore",
    "Index",
    "Match",
    "Shard",
    "build",
    "check_tokenizer",
    "continuations",
    "fingerprint",
    "from_documents",
    "open_datastore",
    "search",
]

warnings.warn("specjax.datastore is now specjax.retrieval.datastore; import that", DeprecationWarning, stacklevel=2)
