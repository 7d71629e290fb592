"""The site: every public name and every option is on a reference page, and the front page stays short."""

import re
from inspect import ismodule
from pathlib import Path
from types import ModuleType

import pytest
import typer

import thinwire
from thinwire_lab.cli import app

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
MODULES = [found for name in thinwire.__all__ if ismodule(found := getattr(thinwire, name))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group, which typer does not say


def _public(module: ModuleType) -> set[str]:
    """Return what a module's page must hold. Modules have pages of their own, and aliases are where they come from."""
    aliases = {alias for found in MODULES for alias in found.__all__} if module is thinwire else set()
    return {n for n in module.__all__ if n != "__version__" and n not in aliases and not ismodule(getattr(module, n))}


@pytest.mark.parametrize("module", [thinwire, *MODULES], ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module: ModuleType) -> None:
    page = (REFERENCE / f"{module.__name__.rpartition('.')[2]}.md").read_text()
    summaries = re.findall(r"\.\. autosummary::\n   :nosignatures:\n\n((?:   \w+\n)+)", page)
    listed = [name for summary in summaries for name in summary.split()] + re.findall(r"\.\. py:data:: (\w+)", page)
    assert len(listed) == len(set(listed))
    assert set(listed) == _public(module)
    assert f".. automodule:: {module.__name__}\n   :members:" in page  # describes what is listed


@pytest.mark.parametrize("path", sorted((ROOT / "src/thinwire/frameworks").glob("*.py")), ids=lambda path: path.stem)
def test_what_frameworks_import_is_in_the_reference(path: Path) -> None:
    """Read, not imported: their frameworks may not be installed."""
    name, page = f"thinwire.frameworks.{path.stem}", (REFERENCE / "frameworks.md").read_text()
    section = page.partition(f".. currentmodule:: {name}\n")[2].partition("```")[0]
    exported = re.findall(r"^__all__ = \[(.*)\]$", path.read_text(), re.MULTILINE)
    assert set(re.findall(r"^   (\w+)$", section, re.MULTILINE)) == set(re.findall(r'"(\w+)"', "".join(exported)))
    assert bool(exported) == (f".. automodule:: {name}\n   :members:" in section)


def _options(name: str) -> str:
    """Return a command's options as the Markdown table of its reference page."""
    rows = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in COMMANDS[name].params:
        if option.name != "help":
            names = ", ".join(f"`{o}`" for o in (*option.opts, *option.secondary_opts) if o.startswith("-"))
            default = option.show_default if isinstance(option.show_default, str) else option.default
            shown = "" if default is None or isinstance(default, bool) else str(default)
            shown = f"`{shown}`" if shown and " " not in shown else shown
            rows.append(f"| {names or f'`{option.metavar}`'} | {shown} | {option.help} |")
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_the_command_line_has_every_option(name: str) -> None:
    page = (REFERENCE / "command-line.md").read_text()
    table = page.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    assert table == _options(name), f"put this between the markers of docs/reference/command-line.md:\n{_options(name)}"


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 450
