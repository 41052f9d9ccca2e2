"""Output of the command line: console, progress, tables, and files."""
