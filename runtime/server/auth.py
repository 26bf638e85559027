"""API keys: which key a path requires. Every path requires one, known or not, except the open ones named here.

The API key opens everything but the admin paths; the admin key opens everything. Without an admin key the API key opens
the admin paths too, and without any key nothing requires one.
"""

import hmac
from collections.abc import Iterable

from llmserve.runtime.config import Secrets, ServerArgs
from llmserve.runtime.request_error import RequestError

OPEN_PATHS = frozenset({"/health"})
ADMIN_PATHS = frozenset(
    {
        "/flush_cache",
        "/abort_request",
        "/update_weights_from_disk",
        "/pause_generation",
        "/continue_generation",
        "/get_load",
    }
)


class KeyPolicy:
    """Decides by path and Authorization header whether a request is allowed."""

    def __init__(self, args: ServerArgs, secrets: Secrets) -> None:
        self._api_keys = [key.encode() for key in (secrets.api_key, secrets.admin_api_key) if key]
        self._admin_keys = [secrets.admin_api_key.encode()] if secrets.admin_api_key else self._api_keys
        self._open = OPEN_PATHS if args.metrics_auth else OPEN_PATHS | {"/metrics"}
        self._closed = secrets.api_key is not None

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises RequestError 401 unless the request carries a key that its path accepts."""
        if path in ADMIN_PATHS:
            accepted = self._admin_keys
        elif path in self._open or not self._closed:
            return
        else:
            accepted = self._api_keys
        if not accepted:
            return
        given = _bearer_token(headers)
        if given is None:
            raise _denied("no API key was given; send it as `Authorization: Bearer KEY`")
        # Compares with all keys, in constant time, so that timing tells nothing about a guess.
        if not sum(hmac.compare_digest(given, key) for key in accepted):
            raise _denied("the API key that was given does not open this path")


def _bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else None
    return None


def _denied(message: str) -> RequestError:
    return RequestError(401, message, type="authentication_error", code="invalid_api_key")
