"""Files that are the old text or the new one, whenever writing stops."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``, or leave it as it was. A link stays one; a device is written to."""
    path, data = path.resolve(), content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # root would replace /dev/null
        path.write_bytes(data)
        return
    draft = path.with_name(f".thinwire.{os.getpid()}.tmp")  # a longer name might not fit
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
