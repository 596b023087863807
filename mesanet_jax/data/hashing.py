"""Hashes values that JSON can hold."""

import hashlib
import json
from typing import Any


def sha256_of_json(value: Any) -> str:
    """Returns the SHA-256 hash of a value as hexadecimal digits; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
