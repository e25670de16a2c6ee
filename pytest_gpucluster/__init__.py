"""A pytest plugin that decides whether a GPU cluster is accepted.

Importing this package or its plugin module loads neither torch nor NVML nor YAML.
"""

from __future__ import annotations

__version__ = "0.1.0"
