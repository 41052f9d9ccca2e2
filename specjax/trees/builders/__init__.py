"""Tree builders, one way to grow a tree per file. Each factory returns a `Builder`."""
