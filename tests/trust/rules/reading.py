"""What a client can make of an answer's bytes: texts, and tokens with others in their place.

Pieces of a stream are joined, ids and names of tokens become bytes, and neighbours stand together.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

_IDS = ("token_ids", "prompt_token_ids", "tokens")
_TOPS = ("top_logprobs", "top_probs")


class Told:
    """The bytes of one answer, read as a client may."""

    def __init__(self, data: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self.texts: dict[str, str] = defaultdict(str)  # joined, by their places
        self.rows: dict[str, list[tuple[bytes, list[bytes]]]] = defaultdict(list)  # of tokens
        for line in data.splitlines():
            line = line.removeprefix(b"data: ")
            if line.startswith((b"{", b"[")) and not line.startswith(b"[DONE]"):
                self._walk(json.loads(line), "")

    def spans(self) -> Iterator[bytes]:
        """Yield all that can be read in one go, tokens in each other's place as well."""
        for text in self.texts.values():
            yield text.encode()
        for row in self.rows.values():
            before = b""
            for token, others in row:
                for other in others:
                    yield before + other
                before += token
            yield before

    def _walk(self, value: Any, path: str) -> None:
        if isinstance(value, str):
            self.texts[path] += value
        elif isinstance(value, list):
            self._walk_list(value, path)
        elif isinstance(value, dict):
            index = value.get("index")
            path += f"[{index}]" if isinstance(index, int) else ""
            if "tokens" in value and "top_logprobs" in value:
                for token, top in zip(value["tokens"], value["top_logprobs"], strict=True):
                    others = [*map(self._bytes, top or ())]
                    self.rows[path].append((self._bytes(token), others))
            for name, one in value.items():
                self._walk(one, f"{path}/{name}")

    def _walk_list(self, values: list[Any], path: str) -> None:
        name = path.rpartition("/")[2]
        if name in _IDS and all(isinstance(one, int) for one in values):
            self.rows[path] += [(self._token_bytes(one), []) for one in values]
        elif name == "prompt_logprobs":
            for place in values:
                ids = [self._token_bytes(int(token)) for token in place or ()]
                self.rows[path].append((ids[0] if ids else b"", ids))
        elif name not in _TOPS and all(isinstance(one, dict) and "token" in one for one in values):
            for one in values:
                top: list[Any] = next((one[top] for top in _TOPS if top in one), [])
                self.rows[path].append((self._of(one), [*map(self._of, top)]))
        for one in values:
            self._walk(one, path)

    def _of(self, token: dict[str, Any]) -> bytes:
        return bytes(token["bytes"]) if token.get("bytes") else self._bytes(token["token"])

    def _bytes(self, name: str) -> bytes:
        if name.startswith("token_id:"):
            return self._token_bytes(int(name.removeprefix("token_id:")))
        if name.startswith("bytes:"):
            return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
        return name.encode()
