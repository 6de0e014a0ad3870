"""Certificates for tests: a CA, and what it signs."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Signed:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path

    @property
    def options(self) -> str:
        """As the options of a URL."""
        return f"sslcert={self.certificate}&sslkey={self.key}"


class Authority:
    """A CA, with a folder for all that it signs."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(f"CA of {name}")
        draft = _begin(self._name, self._name, self._key, days=30)
        self._made = draft.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.certificate = folder / "ca.crt"
        self.certificate.write_bytes(self._made.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *hosts: str, days: int = 30, file: str = "") -> Signed:
        """A certificate for a name, a user's or a server's with these hosts; of negative days one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        draft = _begin(_named(name), self._name, key, days=days)
        if hosts:
            draft = draft.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        signed = draft.sign(self._key, hashes.SHA256())
        files = Signed(self._folder / f"{file or name}.crt", self._folder / f"{file or name}.key")
        files.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        write_key(files.key, key)
        return files

    def server_context(self, signed: Signed, *, wants_certificates: bool = False) -> ssl.SSLContext:
        """What a server with this certificate speaks TLS with; it may want certificates of this CA of its clients."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(signed.certificate, signed.key)
        if wants_certificates:
            context.load_verify_locations(self.certificate)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def write_key(file: Path, key: ec.EllipticCurvePrivateKey, passphrase: str = "") -> None:
    lock = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
    file.touch(mode=0o600)
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _begin(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - timedelta(days=1))
        .not_valid_after(end)
    )
