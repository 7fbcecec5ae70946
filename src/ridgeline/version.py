"""The version of this program, which imports nothing: every room may say it."""

from typing import Final

__version__: Final = "0.1.0"
