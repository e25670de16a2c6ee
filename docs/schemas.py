"""Write the JSON Schemas: of the YAML files, for editors, from the tables that the loaders read by; of results.json.

python docs/schemas.py
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_gpucluster.judge.editor_schemas import limits_schema, workloads_schema
from pytest_gpucluster.reports.results_json import results_schema

FOLDER = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Return each schema's file with its text."""
    schemas = {"thresholds": limits_schema(), "workloads": workloads_schema(), "results": results_schema()}
    return {FOLDER / f"{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
