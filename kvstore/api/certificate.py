"""The daemon's certificate, for both planes: read at start, and anew on SIGHUP without a restart."""

import asyncio
import logging
import ssl
from pathlib import Path

from kvstore.errors import BadRequest

_log = logging.getLogger("kvstore.tls")


class Certificate:
    """`context` is for servers, and stays; connections made after `renew` get the new certificate."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Blocking. With `client_ca`, clients need a certificate that it signed. Raises BadRequest."""
        self._files = cert, key
        self._client_ca = client_ca
        self.context = self._current = self._load()
        self.context.sni_callback = self._choose

    def _load(self) -> ssl.SSLContext:
        cert, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise BadRequest(f"the certificate {cert} and the key {key} (tls_cert, tls_key) can't be used: {error}") from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ssl.SSLError) as error:
                raise BadRequest(f"the certificates in {self._client_ca} (tls_client_ca) can't be read: {error}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        if self._current is not self.context:
            connection.context = self._current

    async def renew(self) -> None:
        """Read the files anew. If they are no good, the certificate stays as it was."""
        try:
            self._current = await asyncio.to_thread(self._load)
        except BadRequest as error:
            _log.error("the certificate stays as it was: %s", error.message)
        else:
            _log.info("certificate re-read from %s", self._files[0])


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not, readable by this user only")
