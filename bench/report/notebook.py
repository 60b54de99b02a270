"""What the notebooks share: the records they read and their look."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.config.schema import checkout
from bench.report import collect
from bench.report.collect import Record


def folders() -> tuple[Path, Path | None]:
    """The user's runs and the reference records: results/ and results/reference/ of the checkout.

    The environment variable DECODEBENCH_RESULTS names one folder to read instead of both.
    """
    results = (checkout() or Path.cwd()) / "results"
    reference = results / "reference"
    if not (given := os.environ.get("DECODEBENCH_RESULTS")):
        return results, reference
    return Path(given), reference if Path(given).resolve() == reference.resolve() else None


def records() -> list[Record]:
    """The runs in both folders.

    Raises:
        UserError: there is no folder, or a manifest cannot be read.
    """
    return collect.read_all(*folders())


def theme() -> None:
    """One look for all notebooks."""
    import matplotlib.pyplot as plt
    import seaborn as sns

    sns.set_theme(style="whitegrid", palette="colorblind", context="notebook")
    sizes = {"axes.titlesize": 10, "axes.labelsize": 10, "xtick.labelsize": 9, "ytick.labelsize": 9}
    look: dict[Any, Any] = {"figure.dpi": 80, "axes.titlelocation": "left", "legend.fontsize": 9, **sizes}
    plt.rcParams.update(look)
