"""Several ranks on one GPU do what one process does there: through NCCL with one rank, and gloo with two on one GPU.

`python tests/rank_gpu.py` starts both and prints the largest differences in fp64. NCCL wants a GPU for each rank: with
one GPU its sums are over a single rank, but are really called for. gloo carries the GPU's tensors through the host.
"""

import faulthandler
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

import ranks
from semaug.util import distributed
from several import in_processes

MODES = {"nccl": 1, "gloo": 2}  # ranks
SECONDS = 60  # after which a process gives up
TOLERANCE = 1e-9
CASES = {
    "paper's order": ranks.Case(),
    "pipelined, clipped": ranks.Case(options={"order": "pipelined", "clip_norm": 0.3}),
    "BatchNorm over all ranks": ranks.Case("batch", options={"sync_batch_norm": True}, half_steps=4),
    "class-wise statistics": ranks.Case(source="class-wise", options={"order": "pipelined"}),
    "micro-batches": ranks.Case(options={"micro_batch": 3}, half_steps=4),
    "small buckets": ranks.Case(options={"order": "pipelined"}, half_steps=4),
}


def main(mode: str) -> None:
    """Train each case alone, on the whole batches, then as one of the ranks; told by the first one."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    ranks.DEVICE = "cuda"
    torch.set_num_threads(1)
    alone = {name: ranks.trained(case) for name, case in CASES.items()}
    limit = timedelta(seconds=SECONDS)
    if mode == "nccl":
        distributed.initialize("cuda", limit)
        distributed.is_running = lambda: True  # though there is but one
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("gloo", timeout=limit)
    worst = 0.0
    for name, case in CASES.items():
        distributed.BUCKET = 1 if name == "small buckets" else 32 * 2**20
        start = time.perf_counter()
        with ranks.counting() as sent:
            state, metrics = ranks.trained(case)
        seconds = time.perf_counter() - start
        error = max(float((state[key] - value).abs().max()) for key, value in alone[name][0].items())
        of_metrics = max(abs(metrics[key] - value) for key, value in alone[name][1].items())
        sizes = 8 * case.half_steps  # an integer for each half batch
        assert sent["all_reduce"] > 0
        assert (sent["all_gather"] > sizes) == (case.source == "class-wise")
        worst = max(worst, error)
        if distributed.is_rank_zero():
            print(
                f"{mode}, {name}: parameters differ by {error:.1e}, metrics by {of_metrics:.1e}; {seconds:.1f} s, "
                f"{sent['all_reduce']} bytes to sums, {sent['all_gather']} gathered",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()
    if not worst < TOLERANCE:
        raise SystemExit(f"{mode}: parameters differ by {worst:.1e}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1])
    elif not torch.cuda.is_available():
        raise SystemExit("there is no GPU")
    else:
        for mode, count in MODES.items():
            in_processes(count, Path(__file__), mode, timeout=SECONDS + 30)
