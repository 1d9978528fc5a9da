"""Signatures on checkpoints: Ed25519 over the checkpoint id, which is the sha256 of the manifest and so covers every byte.

The key pair lies in the deployment's `keys` folder, made on first use and readable by its owner only. Signatures lie beside the
checkpoints (`store/signatures/<id>.ed25519`), because a checkpoint folder holds only files its manifest lists.
Leaves out: key rotation and hardware keys.
"""

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from pipelines.errors import CheckpointInvalid
from pipelines.storage import Home, write_atomic


def _key_path(home: Home) -> Path:
    return home.keys / "signing.ed25519"


def _private_key(home: Home) -> Ed25519PrivateKey:
    path = _key_path(home)
    if not path.exists():
        home.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        raw = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _private_key(home)
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
    return Ed25519PrivateKey.from_private_bytes(path.read_bytes())


def public_key(home: Home) -> Ed25519PublicKey:
    """Return the deployment's public key, making the pair on first use."""
    return _private_key(home).public_key()


def signature_path(home: Home, checkpoint: str) -> Path:
    """Return where a checkpoint's signature lies."""
    return home.store / "signatures" / f"{checkpoint}.ed25519"


def sign(home: Home, checkpoint: str) -> Path:
    """Sign a checkpoint of this deployment's own trainer.

    Args:
        home: The deployment.
        checkpoint: The id the trainer reported, not one read from a folder that arrived from elsewhere.
    """
    path = signature_path(home, checkpoint)
    write_atomic(path, _private_key(home).sign(checkpoint.encode()))
    return path


def check_signature(home: Home, checkpoint: str) -> None:
    """Check a checkpoint's signature.

    Raises:
        CheckpointInvalid: It is missing or not this deployment's.
    """
    path = signature_path(home, checkpoint)
    if not path.exists():
        raise CheckpointInvalid(f"{checkpoint[:12]} is not signed ({path} is missing); only this deployment's trainer signs")
    try:
        public_key(home).verify(path.read_bytes(), checkpoint.encode())
    except InvalidSignature as error:
        raise CheckpointInvalid(f"the signature {path} is not by this deployment's key; do not ship this checkpoint") from error
