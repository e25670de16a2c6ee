"""Every metric of this project, in the order in which documents list them; ``catalogue/`` has them by subject."""

from __future__ import annotations

from pytest_gpucluster.catalogue.fabric import FABRIC
from pytest_gpucluster.catalogue.gpu import GPU
from pytest_gpucluster.catalogue.host import HOST
from pytest_gpucluster.catalogue.metric import Better as Better  # also found here
from pytest_gpucluster.catalogue.metric import Metric as Metric
from pytest_gpucluster.catalogue.metric import Scope as Scope
from pytest_gpucluster.catalogue.surroundings import SURROUNDINGS
from pytest_gpucluster.catalogue.training import SCALING, TRAINING, VISION

CATALOGUE = (*GPU, *HOST, *FABRIC, *SURROUNDINGS, *TRAINING, *SCALING, *VISION)
