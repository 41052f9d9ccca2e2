"""File access: untrusted input, atomic writes, plots, and the libtpu library."""
