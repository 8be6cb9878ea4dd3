"""HTTPS: the certificate that the flags name."""

from __future__ import annotations

import ssl

from baton.launch.limits import OptionError


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """None: HTTP.  Raises `OptionError`, before anything is loaded."""
    if certificate is None:
        if key is not None:
            raise OptionError(f"--ssl-keyfile {key}: give the certificate too, with --ssl-certfile")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # (An encrypted key would be asked for on the terminal.)
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # (of which ssl's errors are)
        named = f"--ssl-certfile {certificate}" + ("" if key is None else f", --ssl-keyfile {key}")
        what = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise OptionError(f"{named}: {what or error}; give files in PEM, not encrypted") from None
    return context
