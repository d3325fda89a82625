"""What every preset resolves to, as far as it differs from a plain run.

``PYTHONPATH=src python tests/goldens/presets.py > tests/goldens/presets.json`` writes the file again; read its diff
before committing it. A plain run is ``tis_mode=off``: decoupled PPO, the mismatch only measured.
"""

from __future__ import annotations

import json
from typing import Any

from trimtab.config import compose, methods, recipes, to_dict
from trimtab.config.keys import options, value_of
from trimtab.spec import MethodSpec, RunSpec


def differing(method: MethodSpec, plain: RunSpec) -> dict[str, Any]:
    """Dotted keys of ``method`` whose value is another than in ``plain``; of a rejection rule, its values not null."""
    run = RunSpec(algo=method.algo, mis=method.mis, loss=method.loss)
    values, found = to_dict(run), dict[str, Any]()
    for key in options():
        section, _, name = key.partition(".")
        if section in ("algo", "mis", "loss") and value_of(run, key) != value_of(plain, key):
            value = values[section][name]
            found[key] = [_given(rule) for rule in value] if key == "mis.reject" else value
    return found


def _given(rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if value not in (None, False, "any")}


def table() -> dict[str, dict[str, Any]]:
    plain = compose(["tis_mode=off"])
    return {name: differing(method, plain) for name, method in methods(recipes(), RunSpec()).items()}


if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
