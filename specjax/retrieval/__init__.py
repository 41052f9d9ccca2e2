"""Retrieval of earlier text: n-grams and suffixes of the text itself, and datastores of corpora."""
