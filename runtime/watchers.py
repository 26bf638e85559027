"""Watchers: temporary subscribers of an instance's metrics, each with a socket of its own in the instance's directory.

Every process that has metrics keeps one Watchers and gets the leases by message. Nothing here waits for a watcher.
"""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from llmserve.runtime.messages import MetricsInput, SubscribeMetricsReqInput
from llmserve.runtime.ports import ipc_address
from llmserve.runtime.wire import Push

log = logging.getLogger(__name__)

MAX_LEASE_S = 60.0
MAX_WATCHERS = 16
HIGH_WATER = 4
"""Messages queued for a slow watcher; newer ones are dropped."""
ENDPOINT = re.compile(r"watch-[A-Za-z0-9._-]{1,40}")
"""Names of watchers' sockets. No channel of the instance matches, so metrics cannot be sent into one."""


class Watchers:
    def __init__(self, directory: Path, now: Callable[[], float] = time.monotonic):
        self.dropped = 0
        """Messages that were dropped because a watcher was too slow."""
        self.directory = directory
        self._now = now
        self._leases: dict[str, tuple[Push, float]] = {}
        """By endpoint: the socket, and the monotonic time at which the lease ends."""

    def __len__(self) -> int:
        return len(self._leases)

    def subscribe(self, request: SubscribeMetricsReqInput) -> float:
        """Grants or renews a lease; returns its seconds. Raises ValueError for an invalid request or too many
        watchers.
        """
        endpoint = request.endpoint
        path = self.directory / endpoint
        if not ENDPOINT.fullmatch(endpoint):
            raise ValueError(f"{endpoint!r} is not the bare name, watch-…, of a socket in the instance's directory")
        if not request.lease_s > 0:
            raise ValueError(f"a lease of {request.lease_s} s ends before it begins")
        self._forget_ended()
        if endpoint not in self._leases and len(self._leases) >= MAX_WATCHERS:
            raise ValueError(f"{MAX_WATCHERS} watchers are here already")
        if not path.is_socket():
            raise ValueError(f"there is no socket at {path}: bind it first")
        lease_s = min(request.lease_s, MAX_LEASE_S)
        known = self._leases.get(endpoint)
        push = known[0] if known else Push(ipc_address(path), high_water=HIGH_WATER)
        self._leases[endpoint] = push, self._now() + lease_s
        return lease_s

    def offer(self, message: MetricsInput) -> None:
        """Sends a message to every watcher whose queue has room."""
        self._forget_ended()
        for push, _ in self._leases.values():
            self.dropped += not push.offer(message)

    def close(self) -> None:
        for push, _ in self._leases.values():
            push.close()
        self._leases.clear()

    def _forget_ended(self) -> None:
        """Closes the sockets of leases that have run out and of watchers that have gone, whose messages do not count as
        dropped.
        """
        now = self._now()
        for endpoint, (push, end) in list(self._leases.items()):
            if now >= end or not (self.directory / endpoint).is_socket():
                push.close()
                del self._leases[endpoint]
