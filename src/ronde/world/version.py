"""Ronde's version, here because the public package stands above every room."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
