"""Seals text that clients keep for the server, such as reasoning. Implements `ports.Seal`."""

from __future__ import annotations

import base64
import binascii
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12
KEY_BYTES = 32


class SecretKeySeal:
    """Encrypts with AES-GCM, which also detects changes. Without `key`, what was sealed is lost at a restart."""

    def __init__(self, key: bytes | None = None, owner: str = "") -> None:
        self._key = key or os.urandom(KEY_BYTES)
        self._cipher = AESGCM(self._key)
        self._owner = owner.encode() or None
        """Signed with the text, and not in it: only the same owner's seal opens it."""

    def of(self, owner: str) -> SecretKeySeal:
        return SecretKeySeal(self._key, owner)

    def seal(self, text: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), self._owner)
        return base64.urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str) -> str | None:
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], self._owner).decode()
        except (binascii.Error, ValueError, InvalidTag):
            return None
