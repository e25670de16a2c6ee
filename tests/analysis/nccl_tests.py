"""Outputs of nccl-tests for tests.

The format is that of src/util.cu of nccl-tests. What stands in the outputs was made up here; nothing was measured.
"""

_BYTES = {"float": 4, "bfloat16": 2, "half": 2}


def table(
    sizes,
    *,
    program="all_reduce_perf",
    dtype="bfloat16",
    hosts=("gpu-a",),
    gpus=8,
    per_process=None,
    wrong=0,
    out_of_place=None,
    nccl=22703,
    bounds=None,
):
    """Return what nccl-tests prints: size in bytes -> busbw in GB/s; in-place is 1 % above out-of-place, or that has
    ``out_of_place``: busbw and wrong elements.

    ``gpus`` is how many each host has, ``per_process`` how many a process has, by default all of a host.
    """
    per_process = gpus if per_process is None else per_process
    lines = [
        f"# nccl-tests version 2.17.6 nccl-headers={nccl} nccl-library={nccl}",
        f"# Collective test starting: {program}",
        f"# nThread 1 nGpus {per_process} minBytes {min(sizes, default=0)} maxBytes {max(sizes, default=0)} "
        "step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0",
        "#",
        "# Using devices",
    ]
    for number, host in enumerate(hosts):
        for gpu in range(gpus):
            rank = number * gpus + gpu
            lines.append(
                f"#  Rank {rank:2} Group  0 Pid {4000 + rank // per_process:6} on {host:>10} device {gpu:2} "
                f"[0000:{0x10 + gpu:02x}:00] NVIDIA H100 80GB HBM3"
            )
    halves = f"{'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    lines += [
        "#",
        "#                                                              out-of-place                       in-place",
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}  {halves}  {halves}",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size, busbw in sizes.items():
        cells = "".join(
            f"  {100.0:7.2f}  {value / 1.75:6.2f}  {value:6.2f}  {_wrong_text(program, half, errors):>6}"
            for half, (value, errors) in enumerate((out_of_place or (busbw / 1.01, wrong), (busbw, wrong)))
        )
        lines.append(f"{size:12}  {size // _BYTES[dtype]:12}  {dtype:>8}  {'sum':>6}  {-1:6}{cells}")
    counted = (0 if isinstance(wrong, str) else int(wrong > 0)) if bounds is None else bounds
    lines += [
        f"# {'Out of bounds values':20} : {counted} {'FAILED' if counted else 'OK'}",
        f"# {'Avg bus bandwidth':20} : {sum(sizes.values()) / max(1, len(sizes)):g} ",
        "#",
        f"# Collective test concluded: {program}",
        "",
    ]
    return "\n".join(lines) + "\n"


def _wrong_text(program, half, wrong):
    if isinstance(wrong, str) or (program == "sendrecv_perf" and half == 1):  # which has no in-place form
        return "N/A"
    return f"{wrong:g}"
