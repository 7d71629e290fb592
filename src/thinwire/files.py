"""Files that are the old text or the new one, whenever writing stops."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``, or leave it as it was. Where it is a link, it stays one; a device is written to."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # root would replace /dev/null
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".thinwire.{os.getpid()}.tmp")  # a longer name might not fit
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
