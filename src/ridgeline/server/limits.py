"""Which key a caller has, and how much it may use. It knows nothing of routes.

Keys are kept as hashes and compared in constant time; only the label of a key is ever shown.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.server.errors import ApiError

ANYONE = "-"  # the label of callers where no key is needed


class Keys:
    """The keys that open the server, each with a label."""

    def __init__(self, keys: Iterable[str], file: Path | None) -> None:
        """Take ``keys``, labelled key1, key2 ..., and those in ``file``.

        Raises ValueError or OSError if the file is no list of keys.
        """
        self._given = [(f"key{i}", key) for i, key in enumerate(keys, start=1)]
        self._file = file
        self.reload()

    def reload(self) -> None:
        """Read the file again; the old keys stay if that fails."""
        found = [*self._given, *(_read(self._file) if self._file else ())]
        self._digests = [(label, _digest(key.encode())) for label, key in found]

    @property
    def are_needed(self) -> bool:
        """Whether there is any key."""
        return bool(self._digests)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in order."""
        return tuple(label for label, _ in self._digests)

    def label_of(self, authorization: bytes | None) -> str | None:
        """Return the label of the key in an Authorization header, None if it is unknown."""
        scheme, _, key = (authorization or b"").partition(b" ")
        digest, match = _digest(key.strip()), None
        for label, known in self._digests:  # compare with all of them, for constant time
            if hmac.compare_digest(digest, known):
                match = label
        return match if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: Path) -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.split("#")[0].split()
        if len(words) > 2:
            raise ValueError(f"{file.name}:{number}: a line is a key, or a label and a key")
        if words:
            keys.append((words[0] if len(words) == 2 else f"line{number}", words[-1]))
    if not keys:
        raise ValueError(f"{file.name} does not contain a key")
    if len({label for label, _ in keys}) < len(keys):
        raise ValueError(f"{file.name} has two keys with one label")
    return keys


class _Bucket:
    """A rate per minute, on average; what is unused is kept for a minute. It may go into debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at_s = clock()

    def left(self) -> float:
        now_s = self._clock()
        self._left += (now_s - self._at_s) * self.per_minute / 60
        self._left, self._at_s = min(self._left, float(self.per_minute)), now_s
        return self._left

    def take(self, amount: int) -> None:
        self._left = self.left() - amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until this amount is available."""
        return max(0.0, (amount - self.left()) * 60 / self.per_minute)


@dataclass
class _Account:
    requests: _Bucket | None
    tokens: _Bucket | None
    num_running: int = 0


class Limits:
    """What each key may use; the same for all of them."""

    def __init__(
        self,
        max_requests_per_minute: int | None,
        max_tokens_per_minute: int | None,
        max_concurrent_requests: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Limit each key; None means no limit."""
        self._per_minute = (max_requests_per_minute, max_tokens_per_minute)
        self._max_running = max_concurrent_requests
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def _account(self, label: str) -> _Account:
        if label not in self._accounts:
            buckets = [per and _Bucket(per, self._clock) for per in self._per_minute]
            self._accounts[label] = _Account(buckets[0] or None, buckets[1] or None)
        return self._accounts[label]

    def enter(self, label: str, num_prompt_tokens: int) -> dict[str, str]:
        """Count a request in; return the headers that tell what is left.

        Raises ApiError 429, and then nothing was counted. ``leave`` must follow.
        """
        account = self._account(label)
        if self._max_running is not None and account.num_running >= self._max_running:
            reason = f"{account.num_running} requests of this key run already"
            raise self._refusal(account, reason, 1.0)
        if account.requests and account.requests.left() < 1:
            reason = f"this key may send {account.requests.per_minute} requests per minute"
            raise self._refusal(account, reason, account.requests.wait_s(1))
        if account.tokens:
            need = min(num_prompt_tokens, account.tokens.per_minute)
            if account.tokens.left() < need:
                reason = f"this key may use {account.tokens.per_minute} tokens per minute"
                raise self._refusal(account, reason, account.tokens.wait_s(need))
            account.tokens.take(num_prompt_tokens)
        if account.requests:
            account.requests.take(1)
        account.num_running += 1
        return self._headers(account)

    def leave(self, label: str, num_generated_tokens: int) -> None:
        """Count a request out, and what it generated."""
        account = self._account(label)
        account.num_running -= 1
        if account.tokens:
            account.tokens.take(num_generated_tokens)

    def _refusal(self, account: _Account, reason: str, wait_s: float) -> ApiError:
        seconds = max(1, math.ceil(wait_s))
        headers = {**self._headers(account), "retry-after": str(seconds)}
        message = f"{reason}: try again in {seconds} s"
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)

    @staticmethod
    def _headers(account: _Account) -> dict[str, str]:
        headers = {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.left())))
                wait_s = bucket.wait_s(bucket.per_minute)
                headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(wait_s)}s"
        return headers
