"""``python -m pytest_gpucluster`` is the command ``gpucluster``."""

from __future__ import annotations

import sys

from pytest_gpucluster.cli.main import main

sys.exit(main())
