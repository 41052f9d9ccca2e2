"""Training data: target responses, packed batches, segments of texts, and draft vocabularies."""
