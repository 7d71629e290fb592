"""Certificates for links between workers."""

import subprocess
from pathlib import Path

_ASKED = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=run"


def made_certificate(path: Path) -> Path:
    """Make a certificate and its key, as docs/how-to/outer.md says."""
    subprocess.run(["openssl", *_ASKED.split(), "-keyout", path, "-out", path], check=True, capture_output=True)
    path.chmod(0o600)
    return path
