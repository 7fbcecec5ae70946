"""Which key a caller has, whether it is an operator's, and how much it may use of the server.

Keys are kept as hashes and compared in constant time; only the label of a key is ever shown.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ridgeline.serve.http.errors import ApiError
from ridgeline.system.machine import usable_cpus

ANYONE = "-"  # the label of callers where no key is needed
_ADMIN = "admin"  # behind a key in the file
_ALONE_S = 1.0  # a key is alone if no other has asked for so long
_REQUESTS_PER_S = 200  # of one key, beside others
_BURST_S = 0.1  # so much of that may come at once
_LIKE_ONE_BYTES, _LONG_BYTES = 1 << 16, 1 << 20  # so much of a body counts as a further request
_LIKE_ONE_REFUSAL = 20  # requests: a refusal counts as these
_LONGEST_S = 5.0  # no request waits longer
_MACHINE_SHARE = 1 / 8  # of all processors, for one key's work beside answers, beside others
_AT_ONCE_S = 0.25  # so much of a key's work is done without a rest
_LONGEST_REST_S = 30.0

_MINUTE_S, _DAY_S = 60.0, 86_400.0


class _Key(NamedTuple):
    label: str
    digest: bytes
    is_operator: bool


class Keys:
    """The keys that open the server, each with a label."""

    def __init__(
        self, keys: Iterable[str], file: Path | None, admin_keys: Iterable[str] = ()
    ) -> None:
        """Take ``keys``, labelled key1, key2 ..., and those in ``file``.

        ``admin_keys``, labelled admin1, admin2 ..., are an operator's. Raises ValueError or OSError
        if the file is no list of keys, or two keys have one label.
        """
        self._from_flags = [
            *(_Key(f"key{i}", _digest(key.encode()), False) for i, key in enumerate(keys, start=1)),
            *(
                _Key(f"{_ADMIN}{i}", _digest(key.encode()), True)
                for i, key in enumerate(admin_keys, start=1)
            ),
        ]
        self._file = file
        self.reload()

    def reload(self) -> None:
        """Read the file again; the old keys stay if that fails."""
        keys = [*self._from_flags, *(_read(self._file) if self._file else ())]
        if len({key.label for key in keys}) < len(keys):
            where = self._file.name if self._file else "the flags"
            raise ValueError(
                f"{where} has two keys with the same label, or one with the label of a flag's key"
            )
        self._keys = keys

    @property
    def are_needed(self) -> bool:
        """Whether there is any key."""
        return bool(self._keys)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in order."""
        return tuple(key.label for key in self._keys)

    def owner_of(self, label: str) -> str:
        """Return what names the key of this label itself: a label may come to mean another key."""
        return next((_owner(key) for key in self._keys if key.label == label), ANYONE)

    @property
    def owners(self) -> dict[str, str]:
        """The labels by what names the keys themselves."""
        return {_owner(key): key.label for key in self._keys} or {ANYONE: ANYONE}

    def is_operator(self, label: str) -> bool:
        """Whether the key of this label is an operator's; so is the only key, and all, without."""
        if len(self._keys) < 2:
            return not self._keys or label == self._keys[0].label
        return any(key.label == label and key.is_operator for key in self._keys)

    def notes(self, are_isolated: bool) -> list[str]:
        """Return what is to be said of several keys at the start."""
        if len(self._keys) < 2:
            return []
        shares = "keys share cached prefixes: each can tell what another sent (--no-isolate-keys)"
        apart = "each key has cached prefixes of its own; --no-isolate-keys shares them"
        nobody = "no key is an operator's: nobody sees all metrics or loads adapters (mark one "
        nobody += "with admin in --api-key-file, or give --admin-api-key)"
        has_operator = any(key.is_operator for key in self._keys)
        return [apart if are_isolated else shares, *(() if has_operator else (nobody,))]

    def proof(self, secret: bytes) -> str:
        """Return what two servers with the same keys and the same ``secret`` have in common."""
        keys = repr(sorted(self._keys)).encode()
        return hmac.new(secret, keys, "sha256").hexdigest()

    def label_of(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return the label of the key in these headers, None if it is unknown.

        Anthropic's clients send it alone in x-api-key; if there is an Authorization, that counts.
        """
        if authorization is None and api_key is not None:
            authorization = b"Bearer " + api_key
        scheme, _, key = (authorization or b"").partition(b" ")
        digest, match = _digest(key.strip()), None
        for candidate in self._keys:  # compare with all of them, for constant time
            if hmac.compare_digest(digest, candidate.digest):
                match = candidate.label
        return match if scheme.lower() == b"bearer" else None


def _owner(key: _Key) -> str:
    return hashlib.sha256(b"owner " + key.digest).hexdigest()[:32]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: Path) -> list[_Key]:
    keys: list[_Key] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.split("#")[0].split()
        if len(words) > 3 or (len(words) == 3 and words[2] != _ADMIN):
            raise ValueError(
                f"{file.name}:{number}: a line must be a key, or a label and a key, and then "
                f"perhaps the word {_ADMIN}"
            )
        if words:
            label, key = (f"line{number}", words[0]) if len(words) == 1 else words[:2]
            keys.append(_Key(label, _digest(key.encode()), len(words) == 3))
    if not keys:
        raise ValueError(f"{file.name} does not contain a key")
    return keys


class _Bucket:
    """A rate, on average; what is unused is kept for its period. It may go into debt."""

    def __init__(
        self, amount: int, clock: Callable[[], float], period_s: float = _MINUTE_S
    ) -> None:
        self.amount, self._period_s = amount, period_s
        self._clock = clock
        self._left = float(amount)
        self._at_s = clock()

    def left(self) -> float:
        now_s = self._clock()
        self._left += (now_s - self._at_s) * self.amount / self._period_s
        self._left, self._at_s = min(self._left, float(self.amount)), now_s
        return self._left

    def take(self, amount: int) -> None:
        self._left = self.left() - amount

    def wait_s(self, amount: float) -> float:
        """Return the seconds until this amount is available."""
        return max(0.0, (amount - self.left()) * self._period_s / self.amount)


class Pacer:
    """Spaces out a key's requests, and its work beside answers, while others ask.

    Refusals and look-ups cost time too: the shortest take so little that a flood of them never
    lets the event loop sleep, and every thread that needs the interpreter beside it waits. Work
    that takes long (bodies, templates, grammars, plans) takes processors from the others' steps.
    Nobody is refused.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, num_processors: int | None = None
    ) -> None:
        """Begin with nobody seen. ``num_processors`` are this machine's unless it is given."""
        self._clock = clock
        self._work_share = min(1.0, (num_processors or usable_cpus()) * _MACHINE_SHARE)
        self._seen_s: dict[str, float] = {}
        self._num_running: Counter[str] = Counter()
        self._free_s: dict[str, float] = {}  # when the next request of a key may begin
        self._rested_s: dict[str, float] = {}  # when a key has rested from all of its work

    def wait_s(self, label: str, num_bytes: int) -> float:
        """Count a request with a body of this length; return after how long it may begin."""
        now_s = self._clock()
        self._seen_s[label] = now_s
        if self._is_alone(label):
            self._free_s.pop(label, None)
            return 0.0
        begin_s = max(self._free_s.get(label, 0.0), now_s - _BURST_S)
        cost_s = (1 + min(num_bytes, _LONG_BYTES) / _LIKE_ONE_BYTES) / _REQUESTS_PER_S
        self._free_s[label] = begin_s + cost_s
        return min(max(0.0, begin_s - now_s), _LONGEST_S)

    @contextmanager
    def present(self, label: str) -> Iterator[None]:
        """Count a key as there until the block ends, however long its answer takes."""
        self._num_running[label] += 1
        try:
            yield
        finally:
            self._num_running[label] -= 1
            self._seen_s[label] = self._clock()

    def note_refusal(self, label: str) -> None:
        """Count a request that was told to come later, if others are there."""
        if label in self._free_s:
            self._free_s[label] += _LIKE_ONE_REFUSAL / _REQUESTS_PER_S

    def note_work(self, label: str, used_s: float) -> None:
        """Count the processor's time for work beside a key's answers, if others are there.

        Not the time that work takes: it is longer because of the others.
        """
        if not self._is_alone(label):
            now_s = self._clock()
            rested_s = max(self._rested_s.get(label, 0.0), now_s - used_s)
            rested_s += used_s / self._work_share
            self._rested_s[label] = min(rested_s, now_s + _LONGEST_REST_S)

    def rest_s(self, label: str) -> float:
        """Return after how long this key's next work may begin; 0 if no other key is there."""
        rest_s = self._rested_s.get(label, 0.0) - self._clock() - _AT_ONCE_S
        return 0.0 if rest_s <= 0 or self._is_alone(label) else rest_s

    def _is_alone(self, label: str) -> bool:
        since_s = self._clock() - _ALONE_S
        others = (one for one in self._seen_s if one not in (label, ANYONE))
        return not any(self._num_running[one] or self._seen_s[one] >= since_s for one in others)


@dataclass
class _Account:
    requests: _Bucket | None
    tokens: _Bucket | None
    daily_tokens: _Bucket | None = None
    num_running: int = 0


class Limits:
    """What each key may use; the same for all of them, unless a key has limits of its own.

    Attributes:
        spent: tokens of each key since the start.
        pace: how a key's requests are spaced out beside those of others.
    """

    def __init__(
        self,
        max_requests_per_minute: int | None = None,
        max_tokens_per_minute: int | None = None,
        max_concurrent_requests: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        own: Callable[[str], Mapping[str, int]] = lambda label: {},
    ) -> None:
        """Limit each key; None means no limit.

        ``own`` returns the limits of a key by the names of the rules' file, which go first.
        """
        self._own = own
        self._per_minute = (max_requests_per_minute, max_tokens_per_minute)
        self._max_running = max_concurrent_requests
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self.spent: Counter[str] = Counter()
        self.pace = Pacer(clock)

    def only_count(self) -> None:
        """Refuse nothing from now on: a router does, which is told what was spent."""
        self._own, self._per_minute, self._max_running = lambda label: {}, (None, None), None
        self._accounts.clear()

    def _account(self, label: str) -> _Account:
        if label not in self._accounts:
            own = self._own(label)
            per_minute = own.get("requests_per_minute", self._per_minute[0]), self._per_minute[1]
            buckets = [per and _Bucket(per, self._clock) for per in per_minute]
            per_day = own.get("tokens_per_day")
            daily = per_day and _Bucket(per_day, self._clock, _DAY_S)
            self._accounts[label] = _Account(buckets[0] or None, buckets[1] or None, daily or None)
        return self._accounts[label]

    @contextmanager
    def counted(self, label: str) -> Iterator[None]:
        """Count a request, whatever becomes of it, and as running until the block ends.

        Raises ApiError 429, and then nothing was counted.
        """
        account = self._account(label)
        if self._max_running is not None and account.num_running >= self._max_running:
            raise _refusal(f"{account.num_running} requests of this key are already running", 1.0)
        if account.requests:
            if account.requests.left() < 1:
                reason = f"this key may send {account.requests.amount} requests per minute"
                raise _refusal(reason, account.requests.wait_s(1))
            account.requests.take(1)
        account.num_running += 1
        try:
            with self.pace.present(label):
                yield
        finally:
            account.num_running -= 1

    def take(self, label: str, num_prompt_tokens: int) -> None:
        """Count the tokens of prompts. Raises ApiError 429, and then nothing was counted."""
        self.reserve(label, num_prompt_tokens)
        self.spent[label] += num_prompt_tokens

    def reserve(self, label: str, num_prompt_tokens: int) -> Callable[[], None]:
        """Hold back tokens until the returned function is called.

        Raises ApiError 429, and then nothing is held back.
        """
        account = self._account(label)
        buckets = [(account.tokens, "minute"), (account.daily_tokens, "day")]
        for tokens, period in buckets:
            need = min(num_prompt_tokens, tokens.amount) if tokens else 0
            if tokens and tokens.left() < need:
                reason = f"this key may use {tokens.amount} tokens per {period}"
                raise _refusal(reason, tokens.wait_s(need))
        self._use(account, num_prompt_tokens)
        reservation = [num_prompt_tokens]
        return lambda: self._use(account, -reservation.pop()) if reservation else None

    def charge(self, label: str, num_tokens: int) -> None:
        """Count tokens that were generated, however many."""
        self.spent[label] += num_tokens
        self._use(self._account(label), num_tokens)

    def _use(self, account: _Account, num_tokens: int) -> None:
        for tokens in (account.tokens, account.daily_tokens):
            if tokens:
                tokens.take(num_tokens)

    def headers(self, label: str) -> dict[str, str]:
        """Return the headers that tell what is left."""
        account, headers = self._account(label), dict[str, str]()
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.amount)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.left())))
                wait_s = bucket.wait_s(bucket.amount)
                headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(wait_s)}s"
        return headers


def _refusal(reason: str, wait_s: float) -> ApiError:
    seconds = max(1, math.ceil(wait_s))
    message = f"{reason}: try again in {seconds} s"
    headers = {"retry-after": str(seconds)}
    return ApiError(429, message, code="rate_limit_exceeded", headers=headers)
