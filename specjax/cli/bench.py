"""`specjax bench` (stub)."""


def bench() -> None:
    """Not here yet."""
