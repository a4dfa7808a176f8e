"""Is what is installed whole, and is it ours alone? Asked before anything compiled is imported."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings

MODULES = ("_codec", "_fastpath", "_outlets", "_sse", "_streams", "_text")
DISTRIBUTION = "smg-fastpath"


def require() -> None:
    """Raise ImportError, saying what to run, unless every compiled module is there for this Python."""
    missing = [name for name in MODULES if importlib.util.find_spec(f"smg.{name}") is None]
    if missing:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ImportError(
            f"smg is not compiled for Python {version}: {', '.join(missing)} not found. In a source tree, "
            f"run `{sys.executable} -m pip install -e .` (needs a C compiler); elsewhere, reinstall "
            f"{DISTRIBUTION}, or leave the source tree so that Python finds the installed package.",
            name=f"smg.{missing[0]}",
        )


def check_distribution() -> list[str]:
    """Names of other installed distributions that own the import name `smg`; warns when there are any.

    Which of them Python imports depends on who was installed last, and so do the files that were overwritten.
    """
    import importlib.metadata  # here, since an embedding process need not hold its 5 MB

    # Not packages_distributions(), which leaves more than that behind: few files name ours, and only those are parsed.
    owners = [
        distribution.metadata["Name"]
        for distribution in importlib.metadata.distributions()
        if "smg" in (distribution.read_text("top_level.txt") or "").split()
        or "\nsmg/__init__.py," in f"\n{distribution.read_text('RECORD') or ''}"
    ]
    others = sorted({name for name in owners if re.sub(r"[-_.]+", "-", name).lower() != DISTRIBUTION})
    if others:
        warnings.warn(
            f"the import name smg also belongs to {', '.join(others)} in this environment, and each may have "
            f"replaced the other's files; install {DISTRIBUTION} in an environment of its own",
            RuntimeWarning,
            stacklevel=2,
        )
    return others
