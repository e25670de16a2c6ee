"""Write the JSON Schemas: of the YAML files, for editors, from the tables that the loaders read by; of results.json.

python docs/schemas.py
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_gpucluster.judge.editor_schemas import SCHEMAS, workloads_schema
from pytest_gpucluster.reports.results_json import results_schema

FOLDER = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Return each schema's file with its text."""
    makers = {**SCHEMAS, "workloads.schema.json": workloads_schema, "results.schema.json": results_schema}
    return {FOLDER / name: json.dumps(make(), indent=2) + "\n" for name, make in makers.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
