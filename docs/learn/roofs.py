"""Write the sizes of models and the speeds of devices into ``roofs.html``: ``python roofs.py``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from estimate import Estimate

from ridgeline.engine.setup.home import stores
from ridgeline.planner.catalogue import devices
from ridgeline.planner.memory.model_spec import read_model_spec

PAGE = Path(__file__).with_name("roofs.html")
DEVICES = ("l4", "rtx4090", "l40s", "a100-80-sxm", "h100-sxm", "h200-sxm", "mi300x")
_DATA = re.compile(r'(?<=<script id="data" type="application/json">\n).*?(?=\n</script>)', re.S)


def data() -> dict[str, Any]:
    """Return what the page calculates with; bytes and operations in seconds are by one device."""
    models = {}
    for path in sorted(PAGE.parent.glob("*-*.json")):
        shape = read_model_spec(str(path), stores()).shape
        one = Estimate(shape, devices()[DEVICES[0]])
        always = one.work.layer_bytes + one.work.head_bytes  # in 16 bits
        read = {part.share: part.num_bytes / 2 for part in one.work.experts} | {1.0: always / 2}
        caches: dict[int, int] = {}  # numbers of a token by the window of their layers, 0 for none
        for layer in shape.layers:
            window = layer.cache.window or 0
            caches[window] = caches.get(window, 0) + layer.cache.values_per_token()
        models[path.stem] = {
            "params": one.params,
            "active": round(one.active),
            "read": [(share, round(num)) for share, num in sorted(read.items())],
            "caches": sorted(caches.items()),
        }
    found = {name: devices()[name] for name in DEVICES}
    return {
        "models": models,
        "devices": {
            name: {
                "bytes_per_s": device.read_bytes_per_s,
                "flop_per_s": device.ops_per_s("bf16"),
                "memory_bytes": device.usable_bytes,
            }
            for name, device in found.items()
        },
    }


def with_data(page: str) -> str:
    """Return the page with the data of today."""
    rows = json.dumps(data(), separators=(",", ":")).replace('},"', '},\n"')
    return _DATA.sub(lambda _: rows, page)


if __name__ == "__main__":
    PAGE.write_text(with_data(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
