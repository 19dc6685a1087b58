"""A served SGLang as an `Endpoint`, over its /generate."""

from __future__ import annotations


class SglangEndpoint:
    """An SGLang server that answers requests. Closing it stops the server, if we launched it."""
