"""Keeps credentials out of everything that a report writes: configs, overrides, command lines, error texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from eagle3x import manifest

_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY|SECRET|SECRET_KEY|PASSWORD|TOKEN)$", re.IGNORECASE)
_KNOWN_FORMS = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})\b")
_SHORTEST = 8
"""Environment values shorter than this are words, not credentials."""


def masked(value: Any) -> Any:
    """A config, as plain JSON values, without its credentials: by the names of its keys, and as `masked_strings`."""
    return masked_strings(manifest.masked(manifest.plain(value)))


def masked_strings(value: Any) -> Any:
    """JSON values whose strings went through `masked_text`; names of keys are not looked at."""
    if isinstance(value, Mapping):
        return {k: masked_strings(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [masked_strings(v) for v in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """A line of text without `name=value` credentials, the environment's credentials, and what looks like a token."""
    text = manifest.masked(text)
    for name, secret in os.environ.items():
        if _SECRET_VARIABLE.search(name) and len(secret) >= _SHORTEST:
            text = text.replace(secret, manifest.MASKED)
    return _KNOWN_FORMS.sub(manifest.MASKED, text)
