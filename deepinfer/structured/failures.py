"""How a grammar can fail to come into being: the kinds, which are finish reasons of the request, and the record."""

from __future__ import annotations

from dataclasses import dataclass

INVALID_SCHEMA = "invalid_schema"
SCHEMA_TIMEOUT = "schema_timeout"
SCHEMA_TOO_LARGE = "schema_too_large"
SCHEMA_CANCELLED = "schema_cancelled"
"""The request was aborted, or the engine closed, before its grammar was ready."""

VENDOR_REASON = "xgrammar runtime errors or timeout"
"""The one finish reason that the vendor's engine has for all of these."""


@dataclass(frozen=True, slots=True)
class GrammarFailure:
    """Why a request gets no grammar."""

    kind: str
    """One of the constants above."""
    message: str
    vendor_reason: str = VENDOR_REASON
