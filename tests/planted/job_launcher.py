"""A launcher of two ranks that say how far they are, as a training does, and of which rank 1 dies. Without torch.

``job_launcher.py HOW [options of torchrun] -m MODULE [options of the rank]``; the rank itself is started as ``rank``.
"""

import json
import os
import signal
import subprocess
import sys
import time

TOLD = """  rank      : 1 (local_rank: 1)
  exitcode  : 43 (pid: 1)
"""


def be_a_rank(rank, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if os.environ["HOW"] == "stubborn" else signal.SIG_DFL)
    for stamp in ("started", "step-1", *(("step-2", "dies") if rank == 1 else ())):
        with open(f"{folder}/rank-{rank}.txt", "a", encoding="ascii") as file:
            file.write(f"{stamp} {time.monotonic()!r} {os.getpid()}\n")
    if rank == 1:
        while not os.path.exists(f"{folder}/rank-0.txt"):
            time.sleep(0.01)
        os._exit(43)
    time.sleep(3600)


def launch(how, *options):
    folder = json.loads(options[-1])["folder"]
    if how == "silent":
        sys.exit(subprocess.call([sys.executable, *options[options.index("-m") :]]))
    command = [sys.executable, "-S", __file__, "rank", folder]
    ranks = [
        subprocess.Popen([*command, str(rank)], env={**os.environ, "HOW": how}, start_new_session=True)
        for rank in range(2)
    ]
    ranks[1].wait()
    if how != "leaves":
        if how != "unwatched":
            ranks[0].terminate()
        ranks[0].wait()
    if how != "unnamed":
        print(TOLD, flush=True)
    sys.exit(how != "hidden")


if sys.argv[1] == "rank":
    be_a_rank(int(sys.argv[3]), sys.argv[2])
launch(*sys.argv[1:])
