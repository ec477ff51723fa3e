"""Decodes the requests of one job file, attention and experts in different processes.

    deepspeed launch/afd_decode.py --config configs/tiny_moe_2a2f_gloo.yaml
    deepspeed launch/afd_decode.py --config configs/tiny_moe_2a2f_gloo.yaml --set pipeline.stages=3 --overwrite
    python launch/afd_decode.py --config configs/tiny_moe_2a2f_gloo.yaml --validate

Works the same under `python`, `torchrun` and `srun`. Exit codes: 0 done, 2 configuration, 3 some requests failed,
4 interrupted, 13 a rank reported a fault, another one: killed. (`torchrun` returns 1 for each of them but 0.)
"""

import argparse
import os
import signal
import sys
import time
import warnings
from pathlib import Path

from afd_megatron.config import dump_config
from afd_megatron.errors import AfdError
from afd_megatron.launcher import (
    launched_rank,
    load_job,
    needs_ranks_started,
    read_start,
    start_ranks,
    thread_variables,
)


def main() -> int:
    args = parse_args()
    rank = 0
    try:
        start = read_start(os.environ)
        rank = start.rank if start else 0
        only_shows = args.validate or args.print_config
        # Rank 0 alone looks for an output, for it may have made it before a slow rank comes here.
        config = load_job(args.config, args.set, may_replace_output=args.overwrite or only_shows or rank > 0)
        if only_shows:
            if rank == 0:
                print(dump_config(config).rstrip() if args.print_config else f"{args.config}: valid")
            return 0
        if needs_ranks_started(config, start):
            return start_ranks(config, Path(__file__).resolve(), job_arguments(args), os.environ)
        launched = launched_rank(config, start, os.environ)
        os.environ.update(thread_variables(config, rank, os.environ))
        warnings.filterwarnings("ignore", module=r"megatron\.")  # of optional packages that a decode does not use
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # for threads that imports start
        from afd_megatron.main import run  # not before: the lines above must be quick, and torch reads the variables

        return run(config, launched, overwrite=args.overwrite)
    except AfdError as error:
        return refuse(error, rank)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the job, a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="beats the file; repeatable")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing job.output")
    parser.add_argument("--validate", action="store_true", help="find every fault of the job and stop")
    parser.add_argument("--print-config", action="store_true", help="print the job with all defaults and stop")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # from the launcher
    return parser.parse_args()


def job_arguments(args: argparse.Namespace) -> list[str]:
    overrides = [f"--set={override}" for override in args.set]
    return ["--config", str(args.config), *overrides, *(["--overwrite"] if args.overwrite else [])]


def refuse(error: AfdError, rank: int) -> int:
    """Say why on rank 0; the others give it time to, since the launcher ends all ranks with the first."""
    if rank == 0:
        for line in str(error).splitlines():
            print(f"{type(error).__name__}: {line}", file=sys.stderr)
    else:
        time.sleep(5)
    return error.exit_code


if __name__ == "__main__":
    exit_code = main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is where the process was started without one
            stream.flush()
    os._exit(exit_code)  # tearing down the modules of torch would take a second of CPU per rank
