"""The GPUs through NVML: one named query, one plain value.

A query without a value has a reason, because "not supported", "no permission" and "the GPU is lost" need different
actions. Memory and processes of a MIG slice are its own; all else is its GPU's.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node.nvml_queries import QUERIES as QUERIES
from pytest_gpucluster.node.nvml_queries import text

NOT_AVAILABLE = "not available"
Absence = Literal["not supported", "no permission", "lost", "failed"]


class NotAvailable(Exception):
    """A query has no value; the text has the reason, ``kind`` its category.

    ``not supported``: by this card, this driver or this nvidia-ml-py. ``no permission``: for this user or container.
    ``lost``: the GPU no longer answers. ``failed``: anything else.
    """

    def __init__(self, reason: str, kind: Absence = "not supported") -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class NvmlGpu:
    """One GPU, as the driver lists it."""

    index: int
    uuid: str
    pci_bus_id: str
    name: str


class Nvml(Protocol):
    """The part of NVML that is used here."""

    def driver_version(self) -> str: ...

    def cuda_version(self) -> str: ...

    def gpus(self) -> tuple[NvmlGpu | None, ...]:
        """GPUs that this process may use, in NVML's order; None for one that does not answer."""

    def find(self, uuid: str) -> NvmlGpu | None:
        """Look a GPU up by its full UUID (``GPU-...``, ``MIG-...``); None where NVML does not list it."""

    def read(self, uuid: str, query: str) -> Any:
        """Read one of ``QUERIES`` as a plain value in its unit.

        Raises:
            NotAvailable: with the reason.
            KeyError: there is no such query.
        """


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Why a query gave no value."""

    reason: str
    kind: Absence


@dataclass(frozen=True, kw_only=True)
class NvmlValues:
    """NVML's values at one moment: query, or its key -> value; and query or key -> why there is none."""

    values: Mapping[str, Any]
    missing: Mapping[str, Missing] = field(default_factory=dict)

    def get(self, query: str) -> Any:
        """Return a value, or None where there is none."""
        return self.values.get(query)

    @property
    def lost(self) -> str:
        """NVML's message where the GPU is lost; else ""."""
        return next((why.reason for why in self.missing.values() if why.kind == "lost"), "")


def read_values(
    nvml: Nvml,
    uuid: str,
    queries: Iterable[str] | Mapping[str, str] = tuple(QUERIES),
    convert: Callable[[str, Any], Any] = lambda key, value: value,
) -> NvmlValues:
    """Read queries of a GPU, one after the other. When the GPU is lost, the rest is not read.

    ``queries`` are names, or key -> name. ``convert`` returns what to keep, from the key and NVML's value; it raises
    ValueError where that is invalid.
    """
    named = queries if isinstance(queries, Mapping) else {query: query for query in queries}
    values: dict[str, Any] = {}
    missing: dict[str, Missing] = {}
    lost: Missing | None = None
    for key, query in named.items():
        if lost is not None:
            missing[key] = lost
            continue
        try:
            values[key] = convert(key, nvml.read(uuid, query))
        except NotAvailable as error:
            missing[key] = Missing(reason=str(error) or NOT_AVAILABLE, kind=error.kind)
            lost = missing[key] if error.kind == "lost" else None
        except Exception as error:  # bindings and drivers fail in many ways; the reason is reported
            missing[key] = Missing(reason=f"{type(error).__name__}: {error}", kind="failed")
    return NvmlValues(values=values, missing=missing)


class PyNvml:
    """NVML through nvidia-ml-py.

    Raises:
        EnvironmentBroken: there is no driver library, or it does not answer.
    """

    def __init__(self) -> None:
        try:
            import pynvml  # type: ignore[import-untyped]  # nvidia-ml-py ships no types

            pynvml.nvmlInit()
        except Exception as error:
            raise EnvironmentBroken(f"NVML is {NOT_AVAILABLE}: {error}") from error
        self._nvml: Any = pynvml
        self._handles: dict[str, Any] = {}

    def driver_version(self) -> str:
        """Read the kernel driver's version, such as ``580.65.06``."""
        return text(self._of_node("nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> str:
        """Read the newest CUDA that the driver supports, such as ``13.0``. Source: nvml.h, NVML_CUDA_DRIVER_VERSION."""
        number = int(self._of_node("nvmlSystemGetCudaDriverVersion_v2"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def gpus(self) -> tuple[NvmlGpu | None, ...]:
        """List the GPUs that this process may use, also those that ``CUDA_VISIBLE_DEVICES`` hides."""
        return tuple(self._identify(handle) for handle in self._permitted())

    def find(self, uuid: str) -> NvmlGpu | None:
        """Look a GPU up. One that has fallen off the bus is not found, which the preflight reports."""
        try:
            return self._identify(self._gpu(uuid), uuid)
        except self._nvml.NVMLError:
            return None

    def _identify(self, handle: Any, uuid: str | None = None) -> NvmlGpu | None:
        nvml = self._nvml
        if handle is None:
            return None
        try:
            return NvmlGpu(
                index=int(nvml.nvmlDeviceGetIndex(handle)),
                uuid=uuid or text(nvml.nvmlDeviceGetUUID(handle)),
                pci_bus_id=text(nvml.nvmlDeviceGetPciInfo(handle).busId),
                name=text(nvml.nvmlDeviceGetName(handle)),
            )
        except nvml.NVMLError:
            return None  # the caller notices it by the place that is empty

    def read(self, uuid: str, query: str) -> Any:
        """Read one query."""
        definition = QUERIES[query]
        nvml = self._nvml
        try:
            handle = self._handle(uuid) if definition.of_slice else self._gpu(uuid)
            return definition.read(nvml, handle)
        except AttributeError as error:
            if error.obj is not nvml:
                raise
            raise NotAvailable(f"the installed nvidia-ml-py is too old for {query} ({error})") from error
        except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
            raise _not_available(nvml, error, query) from error

    def _of_node(self, function: str) -> Any:
        """Call a function that is not about one GPU: its failure is no GPU's fault."""
        try:
            return getattr(self._nvml, function)()
        except self._nvml.NVMLError as error:
            raise EnvironmentBroken(f"NVML failed: {error} ({function}); see `nvidia-smi` on this host") from error

    def _permitted(self) -> list[Any]:
        """Return the handle of each GPU that this process may use, None for one that does not answer.

        NVML also counts GPUs that a cgroup denies to this process, as Slurm's do. They are no fault.
        Source: nvml.h, nvmlDeviceGetCount_v2.
        """
        nvml = self._nvml
        found: list[Any] = []
        for index in range(int(self._of_node("nvmlDeviceGetCount"))):
            try:
                found.append(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError_NoPermission:
                continue
            except nvml.NVMLError:
                found.append(None)
        return found

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            try:
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            except self._nvml.NVMLError_GpuIsLost:
                # NVML fails when any GPU of the node is lost. This one may be healthy.
                found = {known.uuid: handle for handle in self._permitted() if (known := self._identify(handle))}
                if uuid not in found:
                    raise
                self._handles[uuid] = found[uuid]
        return self._handles[uuid]

    def _gpu(self, uuid: str) -> Any:
        """Handle of the whole GPU, also for a MIG slice of it."""
        if not uuid.startswith("MIG-"):
            return self._handle(uuid)
        key = f"gpu of {uuid}"
        if key not in self._handles:
            self._handles[key] = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle(uuid))
        return self._handles[key]


MAKER: Callable[[], Nvml] = PyNvml
"""Opens NVML. The simulation and tests replace it."""


def open_nvml() -> Nvml:
    """Open the NVML of this node.

    Raises: EnvironmentBroken: there is no driver library, or it does not answer.
    """
    return MAKER()


def _not_available(nvml: Any, error: Exception, query: str) -> NotAvailable:
    """Return the category and text of an NVML error."""
    value = getattr(error, "value", None)
    kinds: dict[Any, tuple[Absence, str]] = {
        nvml.NVML_ERROR_NOT_SUPPORTED: ("not supported", "not supported by this GPU or driver"),
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: ("not supported", "unknown to this driver"),
        nvml.NVML_ERROR_DEPRECATED: ("not supported", "no longer supported by this driver"),
        nvml.NVML_ERROR_NO_PERMISSION: ("no permission", "no permission for this user or container"),
        nvml.NVML_ERROR_GPU_IS_LOST: ("lost", "the GPU is lost: it has fallen off the bus or is inaccessible"),
        nvml.NVML_ERROR_RESET_REQUIRED: ("lost", "the GPU requires a reset before it can be used again"),
    }
    kind, reason = kinds.get(value, ("failed", f"{error}"))
    return NotAvailable(f"{reason} ({query})", kind)
