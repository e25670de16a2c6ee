"""Release of ranks that wait for an NCCL kernel.

Aborting the communicators ends their kernels; destroy and shutdown would wait for them. After an abort a waiting call
returns *without* an exception, so the Python release must follow in any case.

Source: torch/distributed/distributed_c10d.py, ``_abort_process_group`` ("with TORCH_NCCL_ASYNC_ERROR_HANDLING turned
off"). The environment for it is set in :data:`ENVIRONMENT`, before torch is imported.
"""

from __future__ import annotations

import threading

ENVIRONMENT = {
    # torchrun exports 1: at the first timeout the watchdog would then kill the process, and its report with it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # By default (1) the watchdog throws a CUDA error again in its own thread, which ends the process by SIGABRT: a GPU
    # that died would leave no failure of its test, and no verdict about the hardware. With 0 the watchdog of that group
    # ends in silence: this plugin's own watcher holds the deadlines.
    # Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, TORCH_NCCL_RETHROW_CUDA_ERRORS.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Left over in an operator's shell, these would change what a wait and a release mean.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    # The flight recorder: which collectives each rank has entered and left.
    "TORCH_FR_BUFFER_SIZE": "2000",
}


class NcclReleaser:
    """Aborts every process group of this process, once."""

    making_group = False

    def __init__(self) -> None:
        self._aborted = False
        self._lock = threading.Lock()

    def release(self) -> None:
        """Abort the default group and all groups made from it, in one go: torch keeps all of them in one register.

        A group that is still in the making is in no register yet; its sockets must be shut down beside this.

        A second call while the first is under way returns at once; one that failed may be tried again.
        """
        from torch.distributed import distributed_c10d

        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._aborted and distributed_c10d.is_initialized():
                distributed_c10d._abort_process_group()
                self._aborted = True
        finally:
            self._lock.release()
