"""`python -m specjax.cli`."""

from specjax.cli import main

main()
