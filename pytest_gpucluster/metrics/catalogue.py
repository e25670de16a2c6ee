"""Every metric of this project: name, unit, which way is better, and what the number means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "none"]
Scope = Literal["rank", "node", "world"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with a name that limits can be set on.

    ``scope``: who must report it: every rank, one rank per node, or one rank of the world. ``peak`` names the attribute
    of ``datasheets.Peaks`` that the value is compared with. ``peak_is_bound``: a value above the peak is impossible; it
    is False where a formula, not bytes on a wire, makes the value, and better algorithms exceed the peak legitimately.

    ``recorded``: why the metric is recorded and not judged, where no file of limits has an entry that applies. Empty:
    it is judged, and without a limit a value is an error.
    """

    name: str
    unit: str
    better: Better
    scope: Scope = "rank"
    peak: str | None = None
    peak_is_bound: bool = True
    recorded: str = ""
    doc: str

    @property
    def is_rate(self) -> bool:
        """Return whether it is a rate of hardware: one that a data sheet bounds, so that each SKU has its own floors.

        A test that measures such a rate is not judged without a floor, whatever its other values are.
        """
        return self.peak is not None


def errors(docs: Mapping[str, str]) -> Iterator[Metric]:
    """Yield metrics that are relative errors, of name -> what they compare."""
    for name, doc in docs.items():
        yield Metric(name=name, unit="ratio", better="lower", doc=doc)


def _matmul(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            doc=f"Dense square product in {doc}: 2 n^3 operations over the time of one product.",
        )
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.best_tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            recorded="a best of many flatters; the square product is judged",
            doc=f"Dense product in {doc} of the shape and layout that a search found to be the fastest, measured anew:"
            " 2 m n k operations over the time of one product. Recorded; a best of many is compared with no limit.",
        )


def _hbm(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"hbm.{kind}.bandwidth",
            unit="TB/s",
            better="higher",
            peak="hbm_tb_per_second",
            doc=f"Device memory: {doc}, over the time of one pass.",
        )


GPU = (
    *_matmul(
        {
            "bf16": "bfloat16",
            "fp16": "half precision",
            "tf32": "fp32 with TF32 tensor cores allowed",
            "fp32": "true fp32, TF32 off",
            "fp8": "fp8 (e4m3) with bf16 output",
        }
    ),
    *_hbm(
        {
            "copy": "device to device copy, bytes read plus bytes written",
            "read": "reduction, bytes read",
            "write": "fill, bytes written",
        }
    ),
    Metric(
        name="inventory.ranks",
        unit="ranks",
        better="none",
        recorded="the inventory's checks decide",
        doc="Ranks that reported before the first test. Recorded; the inventory's checks decide.",
    ),
    Metric(
        name="gpu.findings",
        unit="findings",
        better="lower",
        doc="What is wrong with the GPU, as NVML and the kernel log report it.",
    ),
    Metric(
        name="gpu.usable_dtypes",
        unit="dtypes",
        better="higher",
        doc="Dtypes in which a small product on the GPU equals the CPU's.",
    ),
    Metric(
        name="gpu.memory.total",
        unit="GB",
        better="higher",
        doc="Device memory as NVML counts it, what the driver keeps for itself included.",
    ),
    Metric(
        name="gpu.memory.free",
        unit="%",
        better="higher",
        recorded="gpu.findings asks for 95 % and names the processes that use the rest",
        doc="Device memory that no other process uses, as a part of the total.",
    ),
    Metric(
        name="gpu.temperature",
        unit="degC",
        better="lower",
        recorded="gpu.findings compares it with the card's own limits",
        doc="Temperature of the GPU under load.",
    ),
    Metric(
        name="gpu.power_limit",
        unit="%",
        better="higher",
        recorded="gpu.findings compares it with the card's own default",
        doc="Enforced power limit as a part of the card's default.",
    ),
    Metric(
        name="burn_in.retention",
        unit="%",
        better="higher",
        doc="Rate of the last minute of a burn-in as a part of the first minute's, or of the last and first tenth. What"
        " is missing to 100 % is the decay.",
    ),
    Metric(
        name="burn_in.completed",
        unit="%",
        better="higher",
        recorded="a burn-in that is cut short is an error in any case",
        doc="How far the burn-in came, as a part of the time that was asked for.",
    ),
    Metric(
        name="burn_in.slowed",
        unit="%",
        better="lower",
        doc="Part of a burn-in in which NVML reported a thermal or hardware slowdown or a power brake, the longest"
        " of them.",
    ),
    Metric(
        name="burn_in.temperature",
        unit="degC",
        better="lower",
        recorded="gpu.findings compares it with the card's own limits",
        doc="Highest temperature during the burn-in.",
    ),
    Metric(
        name="burn_in.power",
        unit="W",
        better="none",
        recorded="neither more nor less is better",
        doc="Median power during the burn-in. Recorded.",
    ),
    Metric(
        name="gpu.memory_patterns.wrong_words",
        unit="words",
        better="lower",
        doc="64-bit words of device memory that were not read as they were written, counted in each pass anew.",
    ),
    Metric(
        name="gpu.memory_patterns.share",
        unit="%",
        better="higher",
        doc="Device memory that the patterns were written to, as a part of the total.",
    ),
    Metric(
        name="gpu.determinism.repeated",
        unit="%",
        better="higher",
        doc="Computations that gave the same bits every time on this GPU.",
    ),
    Metric(
        name="gpu.determinism.agreed",
        unit="%",
        better="higher",
        doc="Computations in which this GPU gave the bits of the majority of its model.",
    ),
)


HOST = (
    Metric(
        name="host.nofile",
        unit="files",
        better="higher",
        scope="node",
        doc="Files that a rank may have open (RLIMIT_NOFILE, the soft limit).",
    ),
    Metric(
        name="host.memlock",
        unit="%",
        better="higher",
        scope="node",
        doc="Memory that a rank may lock (RLIMIT_MEMLOCK), as a part of the node's; 100 % with CAP_IPC_LOCK.",
    ),
    Metric(
        name="host.shm",
        unit="GB",
        better="higher",
        scope="node",
        doc="Free space of /dev/shm, at most what the control group may use, over the ranks of the node.",
    ),
    Metric(
        name="host.cpus",
        unit="CPUs",
        better="higher",
        scope="node",
        doc="CPU time that a rank can count on: that of the control group over the ranks, no more than it may run on.",
    ),
    Metric(
        name="host.tasks",
        unit="tasks",
        better="higher",
        scope="node",
        doc="Processes and threads that may be started, over the ranks of the node.",
    ),
    Metric(
        name="host.memory",
        unit="GB",
        better="higher",
        scope="node",
        recorded="what a job needs of it depends on the job",
        doc="Host memory, at most what the control group may use, over the ranks of the node.",
    ),
    *(
        Metric(
            name=f"host_link.{direction}.bandwidth",
            unit="GB/s",
            better="higher",
            peak="host_gb_per_second",
            doc=f"Bytes from {way}, pinned memory, over time; the label mode says what else went on.",
        )
        for direction, way in (("h2d", "host to GPU"), ("d2h", "GPU to host"))
    ),
)


def _collectives(docs: Mapping[str, tuple[str, str, str]]) -> Iterator[Metric]:
    for name, (title, payload, factor) in docs.items():
        yield Metric(
            name=f"nccl.{name}.algbw",
            unit="GB/s",
            better="higher",
            recorded="busbw carries the limit",
            doc=f"{title}: {payload}, over the time of a call.",
        )
        yield Metric(
            name=f"nccl.{name}.busbw",
            unit="GB/s",
            better="higher",
            # No algorithm sends less than this formula counts: a rank must get, or give, all of it over its links.
            peak="link_gb_per_second",
            doc=f"{title} algbw{factor}, as nccl-tests defines it. The slowest rank decides.",
        )
        yield Metric(
            name=f"nccl.{name}.average_busbw",
            unit="GB/s",
            better="higher",
            recorded="busbw of the slowest rank carries the limit",
            doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
        )
        yield Metric(
            name=f"nccl.{name}.latency",
            unit="us",
            better="lower",
            recorded="no measurement to set a limit by",
            doc=f"Time of one small {name}. The slowest rank decides.",
        )


_SHARED = " times (n - 1) / n"

FABRIC = (
    Metric(
        name="fabric.active_ports",
        unit="ports",
        better="higher",
        scope="node",
        doc="InfiniBand or RoCE ports of a node that NCCL may use and that carry data.",
    ),
    Metric(
        name="fabric.port_rate",
        unit="Gb/s",
        better="higher",
        scope="node",
        recorded="it depends on the cards that were ordered, so set yours",
        doc="Rate of the slowest of these ports, width times speed of its link; of as many as there are GPUs, the "
        "fastest first. Nothing is sent.",
    ),
    Metric(
        name="nccl.environment.findings",
        unit="findings",
        better="lower",
        recorded="the findings themselves decide",
        doc="Variables of NCCL, UCX and CUDA that hurt, or differ between ranks. Recorded; the findings decide.",
    ),
    Metric(
        name="nccl.all_reduce.algbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        recorded="busbw carries the limit; algbw is compared with the link peak only",
        doc="All-reduce payload bytes over time: no rank takes in its payload faster than its links.",
    ),
    Metric(
        name="nccl.all_reduce.busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        # The ring formula counts bytes that in-switch reduction and trees never send.
        peak_is_bound=False,
        doc="All-reduce algbw times 2 (n - 1) / n, as nccl-tests defines it. The slowest rank decides.",
    ),
    Metric(
        name="nccl.all_reduce.average_busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        peak_is_bound=False,
        recorded="busbw of the slowest rank carries the limit",
        doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
    ),
    Metric(
        name="nccl.all_reduce.latency",
        unit="us",
        better="lower",
        recorded="no measurement to set a limit by",
        doc="Time of one small all-reduce. The slowest rank decides.",
    ),
    Metric(
        name="link.bandwidth",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="One GPU to one other, the slowest link of the rank, without those whose culprit is another rank.",
    ),
    Metric(
        name="link.ratio_to_median",
        unit="ratio",
        better="higher",
        doc="This bandwidth over the median of all other pairs, in each direction.",
    ),
    *_collectives(
        {
            "all_gather": ("All-gather", "bytes of all ranks' parts", _SHARED),
            "reduce_scatter": ("Reduce-scatter", "bytes of the whole that is summed up", _SHARED),
            "all_to_all": ("All-to-all", "bytes that a rank gives to all ranks", _SHARED),
            "broadcast": ("Broadcast", "bytes of the first rank", ""),
            "send_recv": ("Ring of send and recv", "bytes that a rank sends to the next one", ""),
        }
    ),
)


SURROUNDINGS = (
    Metric(
        name="connectivity.nodes",
        unit="nodes",
        better="higher",
        scope="world",
        recorded="connectivity.pairs has the limit for all of them",
        doc="Nodes that reach every node and are reached by all, over plain TCP.",
    ),
    Metric(
        name="connectivity.pairs",
        unit="%",
        better="higher",
        scope="world",
        doc="Pairs of nodes that reach each other, both directions and each node itself counted, of all pairs.",
    ),
    Metric(
        name="connectivity.connect",
        unit="ms",
        better="lower",
        scope="node",
        doc="The slowest of a node's connections to all nodes: connecting, and one exchange of a few bytes.",
    ),
    Metric(
        name="connectivity.rendezvous",
        unit="ms",
        better="lower",
        scope="node",
        doc="Time that the store through which the ranks have met takes to answer a node.",
    ),
    Metric(
        name="clock.skew",
        unit="ms",
        better="lower",
        scope="node",
        doc="Difference of a node's clock from the median of the other nodes' clocks.",
    ),
    Metric(
        name="dns.forward",
        unit="s",
        better="lower",
        scope="node",
        doc="The slowest lookup of a node's name, of all names, from this node.",
    ),
    Metric(
        name="dns.reverse",
        unit="s",
        better="lower",
        scope="node",
        doc="The slowest lookup of the name of a node's address, of all addresses, from this node.",
    ),
    Metric(
        name="shared_filesystem.verified",
        unit="ratio",
        better="higher",
        scope="node",
        doc="Files of other nodes that a node has read as they were written, of all that it has read.",
    ),
    Metric(
        name="shared_filesystem.visible",
        unit="s",
        better="lower",
        scope="node",
        recorded="what is not seen within 90 s ends the test as a failure",
        doc="The longest time until a node has seen what another one has written to a file that was there before.",
    ),
    Metric(
        name="shared_filesystem.whole_reads",
        unit="%",
        better="higher",
        scope="node",
        doc="Reads that found a whole file, of all reads of a file that is being replaced by renames.",
    ),
    Metric(
        name="shared_filesystem.small_files",
        unit="files/s",
        better="higher",
        scope="node",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Files of 4 KiB that one rank of a node makes, reads and removes, over the time, while all nodes do so.",
    ),
    Metric(
        name="shared_filesystem.free",
        unit="%",
        better="higher",
        scope="node",
        doc="Free space of the shared file system, as a node sees it, of all its space.",
    ),
    Metric(
        name="shared_filesystem.free_inodes",
        unit="%",
        better="higher",
        scope="node",
        doc="Free inodes, of all of them; not measured where a file system has no fixed number.",
    ),
    Metric(
        name="slurm.controller",
        unit="s",
        better="lower",
        scope="world",
        doc="Time that Slurm's controller takes to answer scontrol ping.",
    ),
    Metric(
        name="slurm.nodes",
        unit="nodes",
        better="higher",
        scope="world",
        recorded="a node in another state ends the test as an error",
        doc="Nodes of the job that Slurm calls allocated and healthy.",
    ),
    Metric(
        name="scheduler.findings",
        unit="findings",
        better="lower",
        scope="node",
        recorded="a finding ends the test as an error",
        doc="What of the scheduler's promises a node does not keep.",
    ),
)


def _calls(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"lora.calls.{kind}",
            unit="ratio",
            better="higher",
            recorded="no figure to judge by; the limits of the loss decide",
            doc=f"Part of the answers to held-out prompts that {doc}, written greedily after the training.",
        )


TRAINING = (
    *errors(
        {
            "training.step.loss_error": "Difference of the loss to that of the CPU's same steps, all in fp32.",
            "training.step.gradient_error": "Likewise for the gradients: of their norm before clipping, or their "
            "distance.",
            "training.step.weight_error": "Distance of the weights to the CPU's, as a part of the way that those have "
            "gone.",
            "training.step.bf16_loss_error": "Difference of the loss in bf16 to that of the same device in fp32.",
            "training.step.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "training.step.bf16_weight_error": "Distance of the weights after steps in bf16 to those in fp32, as "
            "above.",
            "ddp.loss_error": "Difference of a rank's loss to that of one process with the same global batch.",
            "ddp.gradient_error": "Likewise for the gradients that the ranks share: of their norm, or their distance.",
            "ddp.bf16_loss_error": "Difference of a rank's loss in bf16 to that of one process in bf16.",
            "ddp.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "fsdp.loss_error": "Difference of a rank's loss, the model being sharded, to that of one process.",
            "fsdp.gradient_error": "Likewise for the gradients: of their norm before clipping, or their distance.",
            "fsdp.bf16_loss_error": "Difference of a rank's loss in bf16 to that of one process in bf16.",
            "fsdp.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "fsdp.ddp_loss_error": "Difference of a rank's loss to that of DistributedDataParallel on the same ranks.",
            "fsdp.share": "Bytes of weights and moments on a rank over those of 1/N of each, rounded up to rows.",
            "checkpoint.resume_error": "Difference of the losses after a checkpoint to those without a break, on the "
            "same ranks.",
            "checkpoint.reshard_error": "Likewise on fewer ranks with the same global batch, or without sharding.",
        }
    ),
    Metric(
        name="fsdp.memory",
        unit="GB",
        better="lower",
        recorded="it depends on the model; fsdp.share compares what is divided with 1/N",
        doc="Memory of a rank in training; the label counted says whether it is the most that torch had allocated, or "
        "weights, gradients and moments.",
    ),
    Metric(
        name="checkpoint.verified",
        unit="ratio",
        better="higher",
        doc="Bytes read from another rank's files that are as they were written, over all bytes of these files.",
    ),
    Metric(
        name="checkpoint.write_bandwidth",
        unit="GB/s",
        better="higher",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Bytes of a rank's file over the time until they are on stable storage, all ranks writing at once.",
    ),
    Metric(
        name="checkpoint.read_bandwidth",
        unit="GB/s",
        better="higher",
        recorded="file systems differ; set a limit by what yours was bought for",
        doc="Bytes of another rank's file over the time until they are read and verified, all ranks reading at once.",
    ),
    Metric(
        name="training.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that a GPU trains on, none of which is padding, over the time of a full step. The slowest rank "
        "decides.",
    ),
    Metric(
        name="training.mfu",
        unit="%",
        better="higher",
        doc="Model FLOPs utilisation: tokens/s times FLOPs per token over the dense bf16 peak; what is recomputed does "
        "not count.",
    ),
    Metric(
        name="training.tflops",
        unit="TFLOPS",
        better="higher",
        peak="bf16_tflops",
        recorded="training.mfu carries the limit; it is compared with the data sheet peak only",
        doc="The same before it is divided by the peak.",
    ),
    Metric(
        name="training.step_time",
        unit="ms",
        better="lower",
        recorded="training.tokens_per_second carries the limit",
        doc="Median time of a full training step.",
    ),
    Metric(
        name="training.step_time_p99",
        unit="ms",
        better="lower",
        recorded="training.tokens_per_second carries the limit",
        doc="99th percentile of the same steps; of fewer than 100 nearly the longest.",
    ),
    Metric(
        name="training.parts",
        unit="ms",
        better="lower",
        recorded="they explain a step that is slow",
        doc="Median time of one part of a step, which the label part names, in steps of their own.",
    ),
    Metric(
        name="lora.finite_steps",
        unit="%",
        better="higher",
        doc="Steps of LoRA fine-tuning in which what a rank contributes to loss and gradients is finite.",
    ),
    *errors(
        {
            "lora.loss_error": "Difference of the loss of some steps to that of one rank with the same global batch.",
            "lora.gradient_error": "Likewise of the gradients' norm before clipping.",
        }
    ),
    Metric(
        name="lora.final_loss",
        unit="nats",
        better="lower",
        doc="Mean loss of the last 10 steps, over the tokens of the assistant.",
    ),
    Metric(
        name="lora.held_out_loss",
        unit="nats",
        better="lower",
        recorded="lora.held_out_ratio decides whether it falls",
        doc="Mean loss of held-out blocks when the training has ended, over the tokens of the assistant.",
    ),
    Metric(
        name="lora.moved_adapters",
        unit="%",
        better="higher",
        doc="The adapters' B matrices, which start as 0, that have moved.",
    ),
    Metric(
        name="lora.unchanged_base",
        unit="%",
        better="higher",
        doc="Frozen tensors that are the same bit by bit after the training, in the part that a rank keeps.",
    ),
    Metric(
        name="lora.replayed_steps",
        unit="%",
        better="higher",
        doc="Steps taken again from the newest checkpoint after which a rank's weights are the same bit by bit.",
    ),
    *errors(
        {
            "lora.held_out_ratio": "Held-out loss after the training as a part of that before it.",
            "lora.resume_error": "Largest difference of a loss when steps are taken again from the newest checkpoint.",
            "lora.reload_error": "Difference of the held-out loss when the saved adapters are read into a new model.",
            "lora.group_error": "Largest difference of a loss to that of the first group that trained at once.",
            "lora.reference_deviation": "Largest distance of the loss curve from the reference, in widths of its band.",
        }
    ),
    Metric(
        name="lora.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that a GPU fine-tunes on, none of which is padding, over the time of a step. The slowest rank "
        "decides.",
    ),
    Metric(
        name="lora.mfu",
        unit="%",
        better="higher",
        doc="The same times FLOPs per token over the dense bf16 peak; what is recomputed does not count.",
    ),
    Metric(
        name="lora.peak_memory",
        unit="GB",
        better="lower",
        recorded="a run that needs more memory than there is ends in an error that states it",
        doc="Most memory that torch held on a GPU.",
    ),
    *_calls(
        {
            "well_formed": "are a function call that a program can read",
            "right_function": "call the function that is due",
            "right_arguments": "call it with the arguments that are due",
        }
    ),
)

SCALING = (
    Metric(
        name="scaling.tokens_per_second",
        unit="tokens/s",
        better="higher",
        doc="Tokens that this rank's GPU trains on, while all groups of `group_size` ranks train at once.",
    ),
    Metric(
        name="scaling.efficiency",
        unit="ratio",
        better="higher",
        scope="world",
        doc="Weak scaling: tokens/s per GPU of the slowest rank in larger groups over those of the median rank in "
        "smaller ones. `kind` is node (a node over one GPU), fabric (the world over a node) or total (the world over "
        "one GPU).",
    ),
    Metric(
        name="scaling.busbw_retention",
        unit="ratio",
        better="higher",
        scope="world",
        doc="All-reduce busbw of the world over that of a node, of the slowest rank each; no word about training.",
    ),
    Metric(
        name="failure_propagation.seconds",
        unit="s",
        better="lower",
        scope="node",
        doc="From the death of a rank in training until no process of its job is left on the node.",
    ),
)

VISION = (
    Metric(
        name="vision.images_per_second",
        unit="images/s",
        better="higher",
        recorded="no measurement to set a limit by; ranks in step are equally fast",
        doc="Images that a GPU is trained on, over the time of its steps, the wait for the next batch included. The "
        "slowest rank decides.",
    ),
    Metric(
        name="vision.data_wait",
        unit="%",
        better="lower",
        recorded="it says whether the loader or the GPU is the slower one",
        doc="Part of that time in which a rank's device waits for the next batch.",
    ),
    Metric(
        name="vision.loss_ratio",
        unit="ratio",
        better="lower",
        doc="Mean of a rank's last losses over its first one.",
    ),
)


CATALOGUE = (*GPU, *HOST, *FABRIC, *SURROUNDINGS, *TRAINING, *SCALING, *VISION)
