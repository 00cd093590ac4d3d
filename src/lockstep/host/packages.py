"""Which packages are installed, without importing them."""

from __future__ import annotations

from importlib import metadata, util


def is_installed(module: str, *distributions: str) -> bool:
    """Whether a module can be imported and is more than a folder that happens to have its name.

    Trackers leave folders of their own names ("wandb", "aim") where they run; Python takes any folder for a package.
    ``distributions`` are the names under which the package may be installed, where they differ from the module's.
    """
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):  # a parent package is missing; a stand-in in sys.modules has no spec
        return False
    if spec is None:
        return False
    return spec.origin is not None or any(_has(name) for name in (distributions or (module,)))


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
