"""Who may ask the gateway: API keys from the environment, or one local key made at first start.

Takes: `TIDEGATE_API_KEYS` (comma-separated `name:key` or bare keys) and the home's key folder. Gives: a key's name, or None.
Leaves out: users (a key may serve many), quotas, and transport security (put a TLS proxy in front of a network address).
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipelines.errors import ConfigError
from pipelines.storage import Home

ENVIRONMENT: Final = "TIDEGATE_API_KEYS"
LOCAL_FILE: Final = "gateway.key"
MIN_CHARS: Final = 12
"""Shorter keys are typing errors or guesses."""


def local_key(home: Home) -> str:
    """Return the deployment's own key, making it (mode 0600) the first time.

    Raises:
        ConfigError: The key file was emptied.
    """
    path = home.keys / LOCAL_FILE
    if not path.exists():
        home.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=home.keys)  # mkstemp gives 0600
        with os.fdopen(handle, "w") as file:
            file.write(f"tg-{secrets.token_urlsafe(24)}")
        with suppress(FileExistsError):  # another process was first: its key stays
            os.link(temporary, path)
        Path(temporary).unlink()
    key = path.read_text().strip()
    if len(key) < MIN_CHARS:
        raise ConfigError(f"{path} holds no usable key; remove it and start again, a new one is made")
    return key


def load_keys(home: Home, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the accepted keys by name.

    Raises:
        ConfigError: A key in the environment is too short.
    """
    keys: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(","))):
        name, colon, key = entry.rpartition(":")
        if len(key) < MIN_CHARS:
            raise ConfigError(f"{ENVIRONMENT}: a key has fewer than {MIN_CHARS} characters; make one with `openssl rand -hex 16`")
        keys[name if colon else f"key-{hashlib.sha256(key.encode()).hexdigest()[:8]}"] = key
    return keys or {"local": local_key(home)}


def who(keys: Mapping[str, str], authorization: str | None) -> str | None:
    """Return the name of the key in an `Authorization: Bearer` header; None when it is no accepted key."""
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        return None
    named = [name for name, key in keys.items() if hmac.compare_digest(key.encode(), given.strip().encode())]
    return named[0] if named else None
