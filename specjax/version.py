"""The version of specjax."""

__version__ = "0.1.0"
