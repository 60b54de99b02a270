"""Which methods there are."""

from __future__ import annotations

import pandas as pd
import yaml

from bench.config import compose, instantiate


def methods() -> pd.DataFrame:
    """One row per method: name, family, guarantee under default settings, what it needs, paper."""
    found = {name: yaml.safe_load(compose.merged("method", name)) for name in compose.groups()["method"]}
    classes = {name: instantiate.method_class(group) for name, group in found.items()}
    rows = [[name, kind.family, kind.guarantee.value, kind.needs, kind.paper] for name, kind in classes.items()]
    return pd.DataFrame(rows, columns=["name", "family", "guarantee", "needs", "paper"])
