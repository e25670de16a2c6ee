"""Metrics of training: steps, throughput, checkpoints, LoRA, scaling, vision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_gpucluster.catalogue.metric import Metric, errors


def _calls(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"lora.calls.{kind}",
            unit="ratio",
            better="higher",
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
        doc="Bytes of a rank's file over the time until they are on stable storage, all ranks writing at once.",
    ),
    Metric(
        name="checkpoint.read_bandwidth",
        unit="GB/s",
        better="higher",
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
        doc="The same before it is divided by the peak.",
    ),
    Metric(name="training.step_time", unit="ms", better="lower", doc="Median time of a full training step."),
    Metric(
        name="training.step_time_p99",
        unit="ms",
        better="lower",
        doc="99th percentile of the same steps; of fewer than 100 nearly the longest.",
    ),
    Metric(
        name="training.parts",
        unit="ms",
        better="lower",
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
            "lora.golden_deviation": "Largest distance of the loss curve from the golden one, in widths of its band.",
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
    Metric(name="lora.peak_memory", unit="GB", better="lower", doc="Most memory that torch held on a GPU."),
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
        doc="Images that a GPU is trained on, over the time of its steps, the wait for the next batch included. The "
        "slowest rank decides.",
    ),
    Metric(
        name="vision.data_wait",
        unit="%",
        better="lower",
        doc="Part of that time in which a rank's device waits for the next batch.",
    ),
    Metric(
        name="vision.loss_ratio",
        unit="ratio",
        better="lower",
        doc="Mean of a rank's last losses over its first one.",
    ),
)
