"""Where the files that ship with edgebuild are: bundled profiles, traffic histograms and templates.

An editable checkout reads the repository's own folders, a wheel reads `edgebuild/data/<kind>`.
Knows places, not contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["profiles", "templates"]


def bundled(kind: Kind) -> Path:
    """The folder of bundled files of that kind. Raises FileNotFoundError when the installation lacks it."""
    package = Path(__file__).resolve().parent
    installed = package / "data" / kind
    checkout = package.parent.parent / kind
    for folder in (installed, checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"edgebuild is installed without its {kind}: neither {installed} nor {checkout} exists")
