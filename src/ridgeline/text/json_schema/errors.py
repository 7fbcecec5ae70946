"""What cannot be held to, and where in a schema it stands."""

from __future__ import annotations


class SchemaError(ValueError):
    """A schema that no grammar can be made of.

    Attributes:
        path: where in the schema: names and indices, with points between them; empty for the whole.
    """

    def __init__(self, path: str, why: str) -> None:
        """Say what is wrong with what stands at ``path``."""
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path


class Unheld(SchemaError):
    """A keyword at ``path`` that is understood, or may be, and that no grammar can hold to."""
