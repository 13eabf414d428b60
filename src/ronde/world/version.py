"""Ronde's version, without the public package, which stands above every room."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
