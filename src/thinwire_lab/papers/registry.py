"""All papers: importing this registers every paper's checks, judges, figures and tables."""

from importlib import import_module
from pkgutil import iter_modules

from thinwire_lab.papers.shared.claims import PAPERS as PAPERS

for paper in PAPERS:
    package = import_module(f"thinwire_lab.papers.{paper.name}")
    for module in iter_modules(package.__path__, f"{package.__name__}."):
        import_module(module.name)
