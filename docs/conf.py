"""How the site is made: sphinx-build -W -b html -c docs . site

The pages are the repository's own Markdown files, where they stand: README.md is the front page, and the papers' pages
are pages too. So a link means the same in the repository and on the site.
"""

import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass, isfunction, ismodule
from pathlib import Path
from typing import Any, get_args, get_type_hints

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.inspect import signature, stringify_signature
from sphinx.util.osutil import relative_uri

import thinwire

ROOT = Path(__file__).parents[1]

project = "thinwire"
copyright = "the authors of thinwire; Apache-2.0"
version = release = thinwire.__version__
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "papers/**.md"]
exclude_patterns = ["site", ".*", "src", "tests", "**/__pycache__"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

myst_heading_anchors = 4
smartquotes_action = "qe"  # options keep their two dashes
highlight_language = "text"  # of what names no language, such as commands and tables
autosummary_generate = False
autodoc_member_order = "bysource"
_FRAMEWORKS = ("accelerate", "lightning", "ray", "torchft", "torchtitan", "transformers")
autodoc_mock_imports = [name for name in _FRAMEWORKS if find_spec(name) is None]
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
default_role = "py:obj"  # `code` in a docstring, which becomes a link if it is a name
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 120
add_module_names = False
toc_object_entries_show_parents = "hide"
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = "thinwire"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_sidebars = {"README": [], "docs/tutorial": [], "CHANGELOG": []}
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navigation_depth": 3,
    "show_toc_level": 2,
    "footer_end": [],
    "secondary_sidebar_items": {"**": ["page-toc"], "README": []},
}

CONTENTS = {
    "README": [
        "Tutorial <docs/tutorial>",
        "How-to <docs/how-to/index>",
        "Reference <docs/reference/index>",
        "Explanation <docs/explanation/index>",
        "Measurements <docs/measurements/index>",
        "Contributing <CONTRIBUTING>",
        "Changes <CHANGELOG>",
        "Security <SECURITY>",
    ],
    "docs/how-to/index": [
        "check",
        "choose-a-recipe",
        "combine-parts",
        "plan",
        "let-it-decide",
        "simulate",
        "training-loops",
        "frameworks",
        "mixed-precision",
        "checkpoint",
        "shard",
        "outer",
        "pipelines",
        "several-hosts",
        "slow-hosts",
        "ray",
        "torchtitan",
        "torchft",
        "parameter-server",
        "watch",
        "read-a-report",
        "add-a-codec",
    ],
    "docs/reference/index": [
        "thinwire",
        "recipes",
        "codecs",
        "memories",
        "exchanges",
        "gathers",
        "formats",
        "payloads",
        "reducer",
        "schedules",
        "outer_steps",
        "pipeline",
        "planner",
        "frameworks",
        "clusters",
        "command-line",
    ],
    "docs/explanation/index": [
        "straight-line",
        "guarantees",
        "steps",
        "waits",
        "planning",
        "pipelines",
        "recipes",
        "wire-format",
        "decisions",
        "source",
        "/papers/README",
    ],
    "docs/measurements/index": [
        "bench",
        "recipes",
        "optimizers",
        "convergence",
        "elastic",
        "exchanges",
        "gpu",
        "kernels",
        "check",
        "compiled",
        "loops",
        "outer",
        "pipeline",
        "planner",
        "server",
        "shard",
        "scatter",
        "gathers",
        "simulate",
    ],
    "papers/README": ["judging", "dragonn/README", "fft/README", "s2/README", "dct/README", "gtopk/README"],
}
"""The order of the pages. It stands here, because a page with a toctree in it does not read well as plain Markdown."""

CALLED = ("class", "function", "method")
MODULES = ["thinwire", *(f"thinwire.{name}" for name in thinwire.__all__ if ismodule(getattr(thinwire, name)))]


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the toctree of a page that has pages below it."""
    if entries := CONTENTS.get(docname):
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(entries) + "\n```\n"


def add_ranges(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Say of each argument in which range it must be, as its annotation does. Runs after Napoleon.

    The page itself says what a module is; the docstring of data is that of its class.
    """
    if what in ("module", "data"):
        lines.clear()
    for argument, words in _ranges(obj):
        said = (i for i, line in enumerate(lines) if line.startswith(f":param {argument}:"))
        at = next(said, len(lines))
        lines[at:at] = [f":type {argument}: {words}"] if at < len(lines) else ["", f":param {argument}: {words}"]


def plain_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: object, arguments: str, returns: str
) -> tuple[str, str] | None:
    """Leave the ranges of arguments out of a signature; `add_ranges` lists them below it."""
    if what not in CALLED or "Annotated[" not in arguments:
        return None
    hints, whole = get_type_hints(_body(obj)), signature(obj, bound_method=what == "method")
    plain = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in whole.parameters.values()]
    shown = stringify_signature(
        whole.replace(parameters=plain), show_return_annotation=False, unqualified_typehints=True
    )
    return shown, returns


def skip_members(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a NamedTuple, which its docstring has, and overriding methods that add nothing to it."""
    overrides = getattr(getattr(obj, "fget", obj), "__override__", False) and not options.inherited_members
    return True if type(obj).__name__ == "_tuplegetter" or (overrides and not obj.__doc__) else None


def _ranges(obj: Any) -> Iterator[tuple[str, str]]:
    """Yield each argument whose annotation says in which range it must be, and that range in words."""
    body = _body(obj)
    ours = isfunction(body) and body.__module__.startswith("thinwire")
    for name, hint in get_type_hints(body, include_extras=True).items() if ours else ():
        if words := next(_words(hint), None):
            yield name, words


def _words(hint: Any) -> Iterator[str]:
    yield from (note.words for note in getattr(hint, "__metadata__", ()) if hasattr(note, "least"))
    for part in get_args(hint):
        yield from _words(part)


def _body(obj: Any) -> Any:
    """Return the function that takes the arguments."""
    return next(filter(isfunction, (obj.__init__, obj.__new__)), obj) if isclass(obj) else obj


def public_names() -> dict[str, str]:
    """Return where a name is documented, by the module that defines it and, if it is one thing only, by itself."""
    defined: dict[str, str] = {}
    short: dict[str, dict[int, str]] = {}
    for module in map(import_module, MODULES):
        for name in module.__all__:
            thing, place = getattr(module, name), f"{module.__name__}.{name}"
            defined[f"{getattr(thing, '__module__', module.__name__)}.{name}"] = place
            defined[place.removeprefix("thinwire.")] = place
            short.setdefault(name, {})[id(thing)] = place
    return defined | {name: place for name, places in short.items() if len(places) == 1 for place in places.values()}


def link_public(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Link a class that a signature names by the file it is in to where its module documents it."""
    place = PUBLIC.get(node.get("reftarget", ""))
    if node.get("refdomain") != "py" or place is None:
        return None
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", place, node, contnode)


PUBLIC = public_names()
shown: set[str] = set()


def show_files(app: Sphinx, doctree: nodes.document) -> None:
    """Lead links to files of the repository to pages that show them, instead of downloads."""
    here = app.env.docname
    for link in list(doctree.findall(addnodes.download_reference)):
        path = (ROOT / here).parent.joinpath(link["reftarget"]).resolve().relative_to(ROOT).as_posix()
        shown.add(path)
        uri = relative_uri(app.builder.get_target_uri(here), f"files/{path}.html")
        link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield a page for every file that a page links to."""
    for path in sorted(shown):
        language = {".py": "python", ".toml": "toml"}.get(Path(path).suffix, "text")
        code = app.builder.highlighter.highlight_block((ROOT / path).read_text(), language, linenos=False)
        yield f"files/{path}", {"title": path, "body": f"<h1>{path}</h1>{code}"}, "page.html"


def copy_front(app: Sphinx, error: Exception | None) -> None:
    """Put the front page where browsers look for it."""
    if error is None and app.builder.name == "html":
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", add_ranges)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", skip_members)
    app.connect("missing-reference", link_public)
    app.connect("doctree-read", show_files, priority=400)  # before Sphinx collects downloads
    app.connect("html-collect-pages", file_pages)
    app.connect("build-finished", copy_front)
