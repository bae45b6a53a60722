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

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = AESGCM(key or os.urandom(KEY_BYTES))

    def seal(self, text: str) -> str:
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher.encrypt(nonce, text.encode(), None)
        return base64.urlsafe_b64encode(sealed).decode()

    def open(self, sealed: str) -> str | None:
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None).decode()
        except (binascii.Error, ValueError, InvalidTag):
            return None
