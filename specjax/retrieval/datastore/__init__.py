"""Datastores: corpora as token ids with a suffix array, for retrieval-based drafters.

store = specjax.retrieval.datastore.open_datastore("wiki.store", tokenizer)  # raises if built with another tokenizer
drafter = specjax.drafters.rest(store.to_device())
"""

from specjax.retrieval.datastore.build import build
from specjax.retrieval.datastore.files import check_tokenizer, fingerprint, open_datastore
from specjax.retrieval.datastore.index import Index, continuations, search
from specjax.retrieval.datastore.store import Datastore, Match, Shard, from_documents

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
