"""Console output, progress and files of the command line."""
