"""Model families: tensor names and configuration fields of each architecture."""
