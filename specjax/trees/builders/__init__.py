"""One way to grow a tree per file; each factory returns a `Builder`."""
