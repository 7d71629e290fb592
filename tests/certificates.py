"""Certificates for links between workers."""

import subprocess
from pathlib import Path

_ASKED = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=run"


def made_certificate(path: Path) -> Path:
    """Make a certificate and its key, as docs/how-to/outer.md says."""
    subprocess.run(["openssl", *_ASKED.split(), "-keyout", path, "-out", path], check=True, capture_output=True)
    path.chmod(0o600)
    return path


def issued_certificates(folder: Path, count: int) -> list[Path]:
    """Make certificates and their keys that one authority has issued, whose own each file holds, too."""
    authority = made_certificate(folder / "authority")
    found = [folder / f"issued {each}" for each in range(count)]
    for path in found:
        asked = [*_ASKED.split(), "-CA", str(authority), "-CAkey", str(authority)]
        subprocess.run(["openssl", *asked, "-keyout", path, "-out", path], check=True, capture_output=True)
        path.write_text(path.read_text() + authority.read_text()[authority.read_text().index("-----BEGIN CERT") :])
        path.chmod(0o600)
    return found
