"""One secret for all workers of a run: a certificate with its key. It encrypts links; others are refused."""

import base64
import hashlib
import os
import socket
import ssl
from pathlib import Path
from typing import final


@final
class Certificate:
    """What a PEM file holds; whoever has the key in it may come in. `digest` tells runs apart, and not the key.

    Raises ValueError if other users can read the file, or for anything but a certificate with its key, and OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"certificate is {str(path)!r}, and no file is there; expected a PEM file with a certificate and its "
                "key: copy the same one to every worker"
            )
        if file.stat().st_mode & 0o077:
            raise ValueError(f"{file} can be read by other users: chmod 600, and keep the key that it holds secret")
        self.digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self._sides = {True: ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), False: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
        for side in self._sides.values():
            side.minimum_version = ssl.TLSVersion.TLSv1_3
            side.check_hostname, side.verify_mode = False, ssl.CERT_REQUIRED
            try:
                side.load_cert_chain(file)
                side.load_verify_locations(file)
            except ssl.SSLError as error:
                raise ValueError(f"{file} does not hold a certificate and its key, in PEM: {error}") from error
        parts = file.read_text().split("-----")
        self._own = base64.b64decode(parts[parts.index("BEGIN CERTIFICATE") + 1])

    def secured(self, connection: socket.socket, *, answers: bool) -> socket.socket:
        """Return the connection once both sides have shown that they have the key. Otherwise raises OSError."""
        found = self._sides[answers].wrap_socket(connection, server_side=answers)
        if found.getpeercert(binary_form=True) != self._own:  # such as another one of the same authority
            found.close()
            raise ConnectionError("the other side has another certificate")
        return found
