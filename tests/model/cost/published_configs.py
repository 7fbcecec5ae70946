"""The configs of published models, with what is known of them, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "configs.json").read_text()
)
