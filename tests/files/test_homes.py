"""Paths in home folders."""

from pathlib import Path

from specjax.files.homes import in_home


def test_unknown_users_are_no_error():
    assert in_home("~/x") == Path.home() / "x"
    assert in_home("~nosuchuser/x") == Path("~nosuchuser/x") and in_home(Path("x")) == Path("x")
