"""Models that read images: a tower turns each image into vectors, which replace embeddings in a text model's prompt."""
