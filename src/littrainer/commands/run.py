"""The command `littrainer run`: starts a new interpreter as `python script.py` does, with the redirection enabled.

So sys.argv, `__main__`, tracebacks, signals, exit status and child processes are python's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from littrainer.commands.command_line import STANDARD_INPUT, BadInput, ProgramParser
from littrainer.commands.restarts import Restarts
from littrainer.distributed.environment import (
    COMMAND,
    DEFAULT_GRACE_S,
    FALSE_VALUES,
    HANG_TIMEOUT,
    TRUE_VALUES,
    USE_DEEPSPEED,
    USE_FSDP,
    is_launched,
    set_torchrun_variables,
)
from littrainer.distributed.launcher import Launch, LaunchError, check_launch, run_processes
from littrainer.redirection.redirect import extend_to_children

ALL = "all"
# Device files of NVIDIA's and AMD's drivers.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# Variable of `accelerate launch`, and options of scripts, that select the CPU.
USE_CPU = "ACCELERATE_USE_CPU"
CPU_OPTIONS = ("--use_cpu", "--use-cpu", "--no_cuda", "--no-cuda")
# Strategy -> variables of `accelerate launch` that select it.
STRATEGIES: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp": {
        USE_FSDP: "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    },
    "deepspeed": {USE_DEEPSPEED: "true"},
}
DESCRIPTION = "Run a script or a module as Python does, with littrainer's Trainer in place of transformers'."
ABOUT_DEVICES = (
    "number of processes on this machine (default: one for each GPU, `all`, or one on the CPU); MIN:MAX starts MAX, "
    "and fewer if one fails again and again (with --restarts)"
)


def main(words: Sequence[str]) -> int:
    """Run `littrainer run` on its command-line words; on POSIX, a single process replaces the current process."""
    parser = ProgramParser("run", DESCRIPTION)
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        help="start all again from the newest checkpoint, up to N times, if a process fails or hangs",
    )
    parser.add_argument(
        "--hang-timeout",
        metavar="SECONDS",
        type=float,
        help="end the processes if their training has not moved for so many seconds",
    )
    return start("run", parser, words)


def start(command: str, parser: ProgramParser, words: Sequence[str], module: Sequence[str] = ()) -> int:
    """Start a command line's program in the requested number of processes; return the exit status.

    Parameters:
        parser: parser with the command's specific options.
        module: `-m MODULE` of a program that runs the script.
    """
    about_grace = f"time to save and end after Ctrl-C or SIGTERM (default: {DEFAULT_GRACE_S})"
    about_strategy = "how the model is sharded over the processes"
    parser.add_argument("--devices", metavar="N", help=ABOUT_DEVICES)
    parser.add_argument("--nodes", metavar="M", type=int, help="number of machines that train together")
    parser.add_argument("--node-rank", metavar="R", type=int, help="number of this machine, counted from 0")
    parser.add_argument("--main-address", metavar="HOST", help="address of machine 0")
    parser.add_argument("--main-port", metavar="P", type=int, help="free port on machine 0; chosen by itself on one")
    parser.add_argument("--grace", metavar="SECONDS", type=int, help=about_grace)
    parser.add_argument("--strategy", choices=list(STRATEGIES), help=about_strategy)
    parser.set_defaults(restarts=None, hang_timeout=None)
    options, program = parser.parse_program(words)
    try:
        return _run([*module, *program], options, ["littrainer", command, *words])
    except LaunchError as error:
        raise BadInput(str(error)) from error


def _run(program: list[str], options: argparse.Namespace, words: Sequence[str]) -> int:
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise LaunchError("python runs with -E, -I or -S, which keep littrainer out of the script; start it without")
    environment = dict(os.environ)
    if options.strategy is not None:
        environment |= {**dict.fromkeys((USE_FSDP, USE_DEEPSPEED), "false"), **STRATEGIES[options.strategy]}
    extend_to_children(environment)
    environment[COMMAND] = shlex.join(words)
    # As multiprocessing repeats python's options (-O, -W, -X, -u ...).
    interpreter_options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *interpreter_options, *program]
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if options.hang_timeout is not None:
        environment[HANG_TIMEOUT] = str(options.hang_timeout)
    is_requested = any(value is not None for value in (options.devices, options.nodes, options.strategy))
    if (is_requested or options.restarts is not None) or (
        not _is_started_by_launcher() and (options.hang_timeout is not None or _count_gpus(program) > 1)
    ):
        launch = _build_launch(options, program)
        if launch.world_size > 1 or launch.is_watched:
            if program[0] == STANDARD_INPUT:
                raise LaunchError(
                    "several processes, and those that are started again, cannot read one script from standard input; "
                    "write it to a file, or give --devices 1 alone"
                )
            if not is_requested and launch.devices > 1:
                started = f"starting {launch.devices} processes, one for each GPU; --devices 1 starts one"
                print(f"littrainer: {started}", file=sys.stderr)
            os.environ.update(environment)
            return run_processes(launch, command, Restarts(launch))
    elif options.node_rank or options.main_address or options.main_port:
        raise LaunchError("--node-rank, --main-address and --main-port are about several machines; give --nodes too")
    elif options.grace is not None:
        raise LaunchError("--grace is about processes that are started together; give --devices too")
    if os.name == "posix":
        os.execve(sys.executable, command, environment)
    return _wait_for(command, environment)


def _wait_for(command: list[str], environment: dict[str, str]) -> int:
    """Run a child process, for Windows, where a shell would not wait for an exec'ed program."""
    with subprocess.Popen(command, env=environment) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the child too.
                continue


def _build_launch(options: argparse.Namespace, program: list[str]) -> Launch:
    gpus = _count_gpus(program)
    devices, min_devices = max(gpus, 1), None
    if options.devices not in (None, ALL):
        minimum, _, maximum = options.devices.rpartition(":")
        if not all(text.lstrip("-").isdecimal() for text in (minimum or "1", maximum)):
            raise LaunchError(
                f"--devices {options.devices}: give the number of processes on this node, or `{ALL}`, or MIN:MAX"
            )
        devices, min_devices = int(maximum), int(minimum) if minimum else None
        if 0 < (min_devices or 0) < devices and Launch(devices, min_devices=min_devices).reduced_devices is None:
            raise LaunchError(
                f"--devices {options.devices}: fewer processes have to divide {devices}; give a lower MIN"
            )
        if min_devices is not None and min_devices <= gpus < devices:
            devices = gpus
    if gpus and devices > gpus:
        raise LaunchError(
            f"--devices {devices}, and this node has {gpus} GPU{'' if gpus == 1 else 's'}: give at most {gpus}. For "
            f"processes on the CPU, give the script --use_cpu, or set {USE_CPU}=true if it takes no such argument"
        )
    if is_launched():
        raise LaunchError(
            "--devices, --nodes, --strategy and --restarts start processes, and this one was started by a launcher "
            "(RANK, WORLD_SIZE or LOCAL_RANK is set); give them to one of the two"
        )
    launch = Launch(
        devices,
        options.nodes or 1,
        options.node_rank or 0,
        options.main_address,
        options.main_port,
        options.grace,
        min_devices=min_devices,
        restarts=options.restarts or 0,
        hang_seconds=options.hang_timeout,
    )
    check_launch(launch)
    return launch


def _count_gpus(program: list[str]) -> int:
    is_on_cpu = os.environ.get(USE_CPU, "").lower() in TRUE_VALUES or _has_cpu_option(program)
    # Loading torch takes a second.
    if is_on_cpu or (os.name == "posix" and not any(map(os.path.exists, DRIVERS))):
        return 0
    import torch

    return torch.cuda.device_count()


def _is_started_by_launcher() -> bool:
    environment = dict(os.environ)
    set_torchrun_variables(environment)
    return is_launched(environment)


def _has_cpu_option(program: list[str]) -> bool:
    """Return whether arguments set `use_cpu` for HfArgumentParser; the last value counts."""
    is_set = False
    for argument, following in zip(program, [*program[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        if name in CPU_OPTIONS:
            text = (value or following).lower()
            is_set = text not in FALSE_VALUES or not text
    return is_set
