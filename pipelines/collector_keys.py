"""API keys of the collector: who may send, and what a key's holder may say of itself.

Takes: a home. Gives: keys that were added and not revoked, and the key that a request carries. A key is shown once, when it is made;
the file (mode 0600) holds its sha256, which is enough for 192 random bits. Each key has an origin, the most consent that its events
may claim, and a name space for its users: a client can neither pass real sessions off as simulated nor speak for another key's user.
Leaves out: the gateway's keys (`deploy/serving/keys.py`: other rights, so other keys), transport security (put a TLS proxy in front
of a network address).
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.errors import ConfigError
from pipelines.events import Consent, Origin
from pipelines.storage import Home, exclusive, write_atomic

FILE: Final = "collector.json"
PREFIX: Final = "tgc_"
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}\Z")
CONSENTS: Final[tuple[Consent, ...]] = ("none", "measure", "train")
"""From the least to the most."""


class Key(BaseModel):
    """One key, without the key."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME.pattern.removesuffix(r"\Z") + "$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    origin: Origin = "live"
    consent: Consent = "measure"
    """The most that its events may claim."""
    namespace: str
    """Its users' names are hashed together with this; keys with the same one share their users. Empty: the gateway's users."""
    tokens: bool = False
    """Whether token ids and log-probabilities are believed: only for recorders that sit where tokens are sampled."""
    created_at_ms: int = Field(ge=0)
    revoked_at_ms: int | None = None


class _File(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a request, and within which bounds."""

    name: str
    origin: Origin
    consent: Consent
    """The most that an event may claim."""
    default_consent: Consent
    """Where an event claims none."""
    namespace: str
    tokens: bool

    def allowed(self, claimed: object) -> Consent:
        """Return the consent of an event: what it claims, at most what the key has."""
        known = claimed if claimed in CONSENTS else self.default_consent
        return min(known, self.consent, key=CONSENTS.index)  # type: ignore[return-value]

    def user(self, named: str | None, keyed: Callable[[str, str], str]) -> str:
        """Return the keyed hash of an event's user; without a name, of the key itself."""
        raw = f"key:{self.name}" if named is None else named
        return keyed("user", f"{self.namespace}/{raw}" if self.namespace else raw)


def file(home: Home) -> Path:
    """Return where the keys are."""
    return home.keys / FILE


def read(home: Home) -> tuple[Key, ...]:
    """Return all keys, revoked ones included.

    Raises:
        ConfigError: The file is not readable as keys.
    """
    path = file(home)
    try:
        return _File.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except (ValidationError, OSError) as error:
        raise ConfigError(
            f"{path} holds no collector keys ({type(error).__name__}); restore it, or remove it and add keys again"
        ) from error


@contextmanager
def _changing(home: Home) -> Iterator[dict[str, Key]]:
    """Yield the keys by name and write them back; one process at a time."""
    home.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
    with exclusive(home.keys / "collector.lock", what="a change of the collector's keys"):
        keys = {key.name: key for key in read(home)}
        yield keys
        data = _File(keys=tuple(sorted(keys.values(), key=lambda key: key.name))).model_dump(mode="json")
        write_atomic(file(home), json.dumps(data, indent=1).encode() + b"\n")  # made 0600


def add(home: Home, name: str, *, origin: Origin, consent: Consent, namespace: str | None, tokens: bool, now_ms: int) -> str:
    """Make a key and return it; it cannot be shown again.

    Args:
        home: The deployment.
        name: What people call it; lower-case letters, digits, `.`, `_`, `-`.
        origin: Where its sessions come from.
        consent: The most that its events may claim.
        namespace: Of its users; None: its own name. A name space has no slash, so that no two can spell the same user.
        tokens: Whether token ids and log-probabilities are believed.
        now_ms: The clock.

    Raises:
        ConfigError: The name is taken or not allowed.
    """
    space = name if namespace is None else namespace
    if not NAME.match(name) or (space and not NAME.match(space)):
        wrong = space if NAME.match(name) else name
        raise ConfigError(f"{wrong!r}: names of keys and of name spaces are 1 to 48 of a-z, 0-9, '.', '_', '-', a letter or digit first")
    key = PREFIX + secrets.token_urlsafe(24)
    with _changing(home) as keys:
        if name in keys:
            state = "revoked" if keys[name].revoked_at_ms is not None else "in use"
            raise ConfigError(f"there is a key named {name!r} ({state}); choose another name, so that past events keep their meaning")
        keys[name] = Key(
            name=name, sha256=_digest(key), origin=origin, consent=consent, namespace=space, tokens=tokens, created_at_ms=now_ms
        )  # fmt: skip
    return key


def revoke(home: Home, name: str, *, now_ms: int) -> Key:
    """Refuse a key from now on, also in a running collector; its record stays.

    Raises:
        ConfigError: There is no such key, or it is revoked already.
    """
    with _changing(home) as keys:
        if name not in keys or keys[name].revoked_at_ms is not None:
            valid = ", ".join(key.name for key in keys.values() if key.revoked_at_ms is None) or "none"
            raise ConfigError(f"there is no valid key named {name!r}; valid ones: {valid}")
        keys[name] = keys[name].model_copy(update={"revoked_at_ms": now_ms})
        return keys[name]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """The keys as a running collector sees them: the file is read again when it changes."""

    def __init__(self, home: Home, *, default_consent: Consent) -> None:
        """Read the keys.

        Raises:
            ConfigError: See `read`.
        """
        self._home = home
        self._default: Consent = default_consent
        self._seen: tuple[int, int] | None = None
        """Inode and time of the file that was read; None when there was none."""
        self._keys: tuple[Key, ...] = ()
        self.refresh()

    def refresh(self) -> None:
        """Read the file again if it is another one than before.

        Raises:
            ConfigError: See `read`; the keys from before stay in force.
        """
        try:
            found = file(self._home).stat()
            seen = (found.st_ino, found.st_mtime_ns)
        except FileNotFoundError:
            seen = None
        if seen != self._seen:
            self._keys = read(self._home)
            self._seen = seen

    @property
    def any(self) -> bool:
        """Whether keys were ever added: then each request needs a valid one."""
        return bool(self._keys)

    def who(self, authorization: str | None) -> Caller | None:
        """Return the holder of the key in an `Authorization: Bearer` header; None when it is no valid one.

        Every key is compared in constant time, found or not.
        """
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip())
        matching = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        if scheme.lower() != "bearer" or not matching or matching[0].revoked_at_ms is not None:
            return None
        key = matching[0]
        return Caller(
            name=key.name, origin=key.origin, consent=key.consent, default_consent=self._default, namespace=key.namespace, tokens=key.tokens
        )  # fmt: skip

    def local(self) -> Caller:
        """Return the caller of a collector without keys, which listens on this machine only."""
        return Caller(
            name="local", origin="live", consent=self._default, default_consent=self._default, namespace="", tokens=False
        )  # fmt: skip
