"""TLS to PostgreSQL: the URL's options as an SSLContext, with files read anew each time, and advice about errors.

Options, variables and files are libpq's (https://www.postgresql.org/docs/current/libpq-ssl.html), except that files
without effect are refused: with sslmode=prefer, the default, a server without TLS is accepted, too.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replaybuf.errors import ConfigError

MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_ALWAYS = MODES[3:]  # TLS is mandatory
#: In place of a file: the CAs that this machine trusts.
SYSTEM = "system"

#: Options that name files, with their defaults: an environment variable, and a file of ~/.postgresql.
FILES = {
    "sslrootcert": ("PGSSLROOTCERT", "root.crt"),
    "sslcert": ("PGSSLCERT", "postgresql.crt"),
    "sslkey": ("PGSSLKEY", "postgresql.key"),
    "sslcrl": ("PGSSLCRL", "root.crl"),
}
VERSIONS = {
    "ssl_min_protocol_version": "PGSSLMINPROTOCOLVERSION",
    "ssl_max_protocol_version": "PGSSLMAXPROTOCOLVERSION",
}
OPTIONS = (*FILES, *VERSIONS)


def read_mode(text: str) -> str:
    """Return a normalised sslmode. Raises ConfigError."""
    mode = text.replace("_", "-")
    if mode not in MODES:
        raise ConfigError(f"there is no such sslmode; known are {', '.join(MODES)}")
    return mode


def read_version(text: str) -> str:
    """Return a TLS version. Raises ConfigError."""
    if text.replace(".", "_") not in ("TLSv1_2", "TLSv1_3"):
        raise ConfigError("a version of TLS is TLSv1.2 or TLSv1.3")
    return text


def tls_of(options: Mapping[str, Any]) -> ssl.SSLContext | str | None:
    """Return the argument `ssl` of asyncpg for these options; None if neither they nor the environment set sslmode.

    Reads the files, which blocks. Raises ConfigError, which names the option and the file.
    """
    files = {name: _file(options, name) for name in FILES}
    mode = options.get("ssl") or os.environ.get("PGSSLMODE")
    if mode is None and files["sslrootcert"] == SYSTEM:
        mode = "verify-full"
    mode = None if mode is None else read_mode(mode)
    if mode not in _ALWAYS:
        if mode != "disable" and (unused := [name for name in OPTIONS if name in options]):
            raise ConfigError(
                f"the option {unused[0]} needs sslmode=verify-full (or verify-ca, or require): without it a server "
                "without TLS is accepted, too"
            )
        return mode
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = mode == "verify-full"
    _trust(context, mode, files["sslrootcert"], files["sslcrl"])
    _identify(context, files["sslcert"], files["sslkey"])
    for (name, variable), bound in zip(VERSIONS.items(), ("minimum_version", "maximum_version"), strict=True):
        if version := options.get(name) or os.environ.get(variable):
            setattr(context, bound, ssl.TLSVersion[read_version(version).replace(".", "_")])
    return context


def _file(options: Mapping[str, Any], name: str) -> str | None:
    variable, usual = FILES[name]
    if given := options.get(name) or os.environ.get(variable):
        return str(given)
    with contextlib.suppress(RuntimeError, KeyError, OSError):  # no home directory
        path = Path.home() / ".postgresql" / usual
        if path.exists():
            return str(path)
    return None


def _trust(context: ssl.SSLContext, mode: str, root: str | None, revoked: str | None) -> None:
    """Set the CAs that a context trusts. As with libpq, `require` verifies the chain only if a CA is given."""
    if root == SYSTEM:
        if mode != "verify-full":
            raise ConfigError(
                "sslrootcert=system needs sslmode=verify-full: anybody can have a certificate of a public CA"
            )
        context.load_default_certs()
    elif root is not None:
        _load("sslrootcert", root, lambda: context.load_verify_locations(cafile=root))
    elif mode == "require":
        context.verify_mode = ssl.CERT_NONE
    else:
        raise ConfigError(
            f"sslmode={mode} needs the certificate of the server's CA: sslrootcert=FILE, or sslrootcert=system for the "
            "CAs that this machine trusts (or PGSSLROOTCERT, or ~/.postgresql/root.crt)"
        )
    if revoked is not None and context.verify_mode != ssl.CERT_NONE:
        _load("sslcrl", revoked, lambda: context.load_verify_locations(cafile=revoked))
        context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN


def _identify(context: ssl.SSLContext, certificate: str | None, key: str | None) -> None:
    """Load the client's certificate and key into a context."""
    if certificate is None:
        if key is not None:
            raise ConfigError(f"sslkey: the key {key} needs its certificate: sslcert=FILE")
        return
    if key is None:
        raise ConfigError(f"sslcert: the certificate {certificate} needs its key: sslkey=FILE")
    _load("sslcert", certificate, lambda: Path(certificate).read_bytes())
    _load("sslkey", key, lambda: Path(key).read_bytes())
    found = os.stat(key)
    others = stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if found.st_uid == 0 else stat.S_IRWXG)
    if os.name == "posix" and found.st_mode & others:
        raise ConfigError(f"sslkey: the key {key} can be read by others; allow nobody else to: chmod 600 {key}")

    def encrypted() -> str:
        raise ConfigError(
            f"sslkey: the key {key} has a passphrase, which nobody could type: openssl pkey -in {key} writes it without"
        )

    _load(
        "sslcert and sslkey", f"{certificate} and {key}", lambda: context.load_cert_chain(certificate, key, encrypted)
    )


def _load(option: str, path: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{option}: the key isn't the certificate's: {path}") from None
        raise ConfigError(f"{option}: {path}: not in PEM form, or damaged ({error.reason or 'no PEM'})") from None
    except OSError as error:
        raise ConfigError(f"{option}: {path} can't be read: {error.strerror}") from None


# Advice about errors

_CA = "give the certificate of the CA that signed the server's: sslrootcert=FILE"
_OTHER_NAME = "connect by a name that is in the certificate, or let the server have one with this name"
#: By OpenSSL's verify code.
_UNTRUSTED = {
    9: "check the clocks of this machine and of the server, or wait",
    10: "let the server have a new one (or check this machine's clock)",
    18: _CA,
    19: _CA,
    20: _CA,
    21: _CA,
    23: "it was called back: let the server have a new one",
    3: "the file of sslcrl must have a list of each CA of the chain, that isn't out of date",
    12: "give a newer list of revoked certificates: sslcrl=FILE",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
#: By parts of OpenSSL's names for alerts and protocol errors.
_ALERTS = {
    "ALERT_UNKNOWN_CA": "it doesn't know the CA of the client's certificate (sslcert)",
    "ALERT_CERTIFICATE_EXPIRED": "the client's certificate (sslcert) has expired: give a new one",
    "ALERT_CERTIFICATE_REVOKED": "the client's certificate (sslcert) was revoked: give another one",
    "ALERT_CERTIFICATE_REQUIRED": "it wants a certificate of the client: give sslcert and sslkey",
    "ALERT_DECRYPT_ERROR": "it can't verify the client's certificate (sslcert): another CA of the same name signed it",
    "ALERT_BAD_CERTIFICATE": "it refuses the client's certificate (sslcert)",
    "PROTOCOL_VERSION": "it speaks no version of TLS that is allowed here (ssl_min_protocol_version)",
    "UNSUPPORTED_PROTOCOL": "it speaks no version of TLS that is allowed here (ssl_min_protocol_version)",
    "WRONG_VERSION_NUMBER": "what answers there doesn't speak TLS",
}


def why_not(error: BaseException) -> str | None:
    """Return why a TLS connection failed, with advice, as the rest of a sentence; None for other errors."""
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = _UNTRUSTED.get(error.verify_code)
        said = error.verify_message.rstrip(".")
        return f"is not trusted: {said}{f'; {advice}' if advice else ''}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").upper()
        said = next((text for part, text in _ALERTS.items() if part in reason), reason or str(error))
        return f"ended the TLS handshake: {said}"
    if "rejected SSL upgrade" in str(error):
        return (
            "has no TLS, and sslmode asks for it: switch it on there (ssl = on), or, where the network is trusted, "
            "take sslmode=disable"
        )
    return None
