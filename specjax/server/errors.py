"""Errors that a client of the server receives, in the form of the OpenAI API."""

from __future__ import annotations

from typing import Any

from specjax.serving.batch import Served

BUSY_SECONDS = 1
"""Seconds after which a client may try again (the header Retry-After)."""

QUEUE_TIMEOUT, TIMEOUT, OVERFLOW, STOPPED = "queue_timeout", "timeout", "overflow", "stopped"
"""Reasons why the server ends a request, in addition to those of `Served`."""
STATUSES = {
    "refused": 400, "failed": 500, "cancelled": 500, QUEUE_TIMEOUT: 503, TIMEOUT: 504, OVERFLOW: 503, STOPPED: 503
}  # fmt: skip
"""Status codes of the reasons without a complete text."""


class ApiError(Exception):
    """An answer with an error: its status code, one sentence, and the fields of the OpenAI API."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(BUSY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def document(self) -> dict[str, Any]:
        """Return the error as JSON."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def raise_unfinished(served: Served) -> None:
    """Raise ApiError if a request ended without a complete text."""
    if served.finish_reason in STATUSES:
        message = served.error or f"the request was {served.finish_reason}"
        raise ApiError(STATUSES[served.finish_reason], message, code=served.finish_reason)
