"""The command `littrainer run`.

It hands over to a fresh interpreter, started exactly as `python script.py` would be, with the redirection in its
environment. So sys.argv, `__main__`, tracebacks, signals, exit status and the processes that the script spawns are
those of python itself. If there are several GPUs, or several devices are asked for, it starts that interpreter once for
each of them, and waits for all.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from littrainer.commands.command_line import CommandParser, complain
from littrainer.commands.restarts import Restarts
from littrainer.distributed.environment import (
    COMMAND,
    FALSE_WORDS,
    HANG_TIMEOUT,
    SECONDS_TO_SAVE,
    TRUE_WORDS,
    USE_DEEPSPEED,
    USE_FSDP,
    adopt_launcher_variables,
    is_launched,
)
from littrainer.distributed.launcher import Launch, LaunchError, check, run_processes
from littrainer.redirection.redirect import extend_to_children

# Given as the script's name, as with python itself.
STANDARD_INPUT = "-"
# As number of devices: a process for each GPU.
ALL = "all"
# Where drivers of NVIDIA's and AMD's GPUs are found on Linux.
DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
# How `accelerate launch`, and the script's own arguments, ask for the CPU.
USE_CPU = "ACCELERATE_USE_CPU"
CPU_OPTIONS = ("--use_cpu", "--use-cpu", "--no_cuda", "--no-cuda")
# Strategy -> variables with which `accelerate launch` asks for it; what they leave open is as with the argument alone.
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
# Options of `littrainer run` -> the name of its value, its type, and what `--help` says about it.
RUN_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--devices": (
        "N",
        str,
        "number of processes on this machine (default: one for each GPU, `all`, or one on the CPU); MIN:MAX starts "
        "MAX, and fewer if one fails again and again (with --restarts)",
    ),
    "--nodes": ("M", int, "number of machines that train together"),
    "--node-rank": ("R", int, "number of this machine, counted from 0"),
    "--main-address": ("HOST", str, "address of machine 0"),
    "--main-port": ("P", int, "free port on machine 0; one machine finds one by itself"),
    "--grace": ("SECONDS", int, f"time to save and end after Ctrl-C or SIGTERM (default: {SECONDS_TO_SAVE})"),
    "--restarts": ("N", int, "start all again from the newest checkpoint, up to N times, if a process fails or hangs"),
    "--hang-timeout": ("SECONDS", float, "end the processes if their training has not moved for so many seconds"),
    "--strategy": ("NAME", str, f"how the model is spread over the processes: {', '.join(STRATEGIES)}"),
}

DESCRIPTION = "Run a script or a module as Python does, with littrainer's Trainer in place of transformers'."


def build_parser(command: str = "littrainer run", description: str = DESCRIPTION, *without: str) -> CommandParser:
    """Return the parser of the options of a command, without some, and of the name of the program it starts."""
    usage = f"{command} [-h] [OPTIONS] SCRIPT [ARGS ...]\n       {command} [-h] [OPTIONS] -m MODULE [ARGS ...]"
    parser = CommandParser(command, description=description, usage=usage)
    parser.set_defaults(restarts=None, hang_timeout=None)
    for name, (metavar, kind, about) in RUN_OPTIONS.items():
        choices = list(STRATEGIES) if name == "--strategy" else None
        if name not in without:
            parser.add_argument(name, metavar=metavar, type=kind, choices=choices, help=about)
    program = parser.add_mutually_exclusive_group()
    program.add_argument("script", nargs="?", metavar="SCRIPT", help="script to run, or a folder with __main__.py")
    program.add_argument("-m", dest="module", metavar="MODULE", help="module to run, as in python -m")
    parser.epilog = "Everything after SCRIPT or MODULE is passed to the program."
    return parser


def main(words: Sequence[str]) -> int:
    """Run the command on what follows `littrainer run`.

    Returns:
        The exit status. It does not return if one process is enough and the operating system can replace it by another.
    """
    return start("run", build_parser(), words)


def start(command: str, parser: CommandParser, words: Sequence[str], through: Sequence[str] = ()) -> int:
    """Start the program that a command line names.

    Parameters:
        command: the command's name, for complaints.
        parser: of its options.
        words: what follows the command.
        through: `-m MODULE` of a program that takes this one as its arguments.

    Returns:
        as `main`.
    """
    own, program = _split_at_program(list(words))
    options = parser.parse_args(own)
    if not program:
        parser.error("no program is named; give a SCRIPT, or -m MODULE, after the options and their values")
    try:
        if program[0] != "-m":
            _check_script(program[0])
        return _run([*through, *program], options, ["littrainer", command, *words])
    except LaunchError as error:
        return complain(command, str(error))


def _split_at_program(given: list[str]) -> tuple[list[str], list[str]]:
    """Divide the arguments into those that littrainer parses and the program's: ["-m", MODULE, ...] or [SCRIPT, ...].

    The first list names the program too, for the parser to check. argparse alone cannot do it: it would take options of
    the program for littrainer's.
    """
    is_value = False
    for position, argument in enumerate(given):
        if is_value or argument in RUN_OPTIONS:
            is_value = not is_value
            continue
        if argument == "-m":
            return given[: position + 2], given[position:]
        if argument.startswith("-m"):
            return given[: position + 1], ["-m", argument[2:], *given[position + 1 :]]
        if argument == "--":
            program = given[position + 1 :]
            if program and program[0].startswith("-"):
                # python would take such a name for its options.
                program[0] = os.path.join(os.curdir, program[0])
            return given[: position + 2], program
        if argument == STANDARD_INPUT or not argument.startswith("-"):
            return given[: position + 1], given[position:]
    return given, []


def _run(program: list[str], options: argparse.Namespace, words: Sequence[str]) -> int:
    """Become the program, or start it several times."""
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise LaunchError("python runs with -E, -I or -S, which keep littrainer out of the script; start it without")
    environment = dict(os.environ)
    if options.strategy is not None:
        environment |= {**dict.fromkeys((USE_FSDP, USE_DEEPSPEED), "false"), **STRATEGIES[options.strategy]}
    extend_to_children(environment)
    environment[COMMAND] = shlex.join(words)
    # How python itself repeats its options (-O, -W, -X, -u ...) for the interpreters that multiprocessing starts.
    interpreter_options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *interpreter_options, *program]
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    if options.hang_timeout is not None:
        environment[HANG_TIMEOUT] = str(options.hang_timeout)
    is_asked_for = any(getattr(options, name) is not None for name in ("devices", "nodes", "strategy"))
    if (is_asked_for or options.restarts is not None) or (
        not _is_started_by_launcher() and (options.hang_timeout is not None or _count_gpus(program) > 1)
    ):
        launch = _launch(options, program)
        if launch.world_size > 1 or launch.is_watched:
            if program[0] == STANDARD_INPUT:
                raise LaunchError(
                    "several processes, and those that are started again, cannot read one script from standard input; "
                    "write it to a file, or give --devices 1 alone"
                )
            if not is_asked_for and launch.devices > 1:
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
    """Run the command as a child, since Windows would give the terminal back while a program that replaces us runs."""
    with subprocess.Popen(command, env=environment) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the child too, and how it ends is for the child to say.
                continue


def _launch(options: argparse.Namespace, program: list[str]) -> Launch:
    """Return what to start, from the options of the command line."""
    gpus = _count_gpus(program)
    devices, fewest = max(gpus, 1), None
    if options.devices not in (None, ALL):
        least, _, most = options.devices.rpartition(":")
        if not all(word.lstrip("-").isdecimal() for word in (least or "1", most)):
            raise LaunchError(
                f"--devices {options.devices}: give the number of processes on this node, or `{ALL}`, or MIN:MAX"
            )
        devices, fewest = int(most), int(least) if least else None
        if 0 < (fewest or 0) < devices and Launch(devices, fewest_devices=fewest).fewer_devices is None:
            raise LaunchError(
                f"--devices {options.devices}: fewer processes have to divide {devices}; give a lower MIN"
            )
        if fewest is not None and fewest <= gpus < devices:
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
        fewest_devices=fewest,
        restarts=options.restarts or 0,
        hang_seconds=options.hang_timeout,
    )
    check(launch)
    return launch


def _count_gpus(program: list[str]) -> int:
    """Return how many GPUs a program can use: none if it is to run on the CPU."""
    is_on_cpu = os.environ.get(USE_CPU, "").lower() in TRUE_WORDS or _asks_for_cpu(program)
    # Loading torch takes a second.
    if is_on_cpu or (os.name == "posix" and not any(map(os.path.exists, DRIVERS))):
        return 0
    import torch

    return torch.cuda.device_count()


def _is_started_by_launcher() -> bool:
    found = dict(os.environ)
    adopt_launcher_variables(found)
    return is_launched(found)


def _asks_for_cpu(program: list[str]) -> bool:
    """Whether the program's arguments set `use_cpu`, as HfArgumentParser reads them."""
    asks = False
    for position, argument in enumerate(program):
        name, _, value = argument.partition("=")
        if name not in CPU_OPTIONS:
            continue
        following = program[position + 1] if position + 1 < len(program) else ""
        if not value and following.lower() in (*TRUE_WORDS, *FALSE_WORDS):
            value = following
        asks = not value or value.lower() not in FALSE_WORDS
    return asks


def _check_script(script: str) -> None:
    if script == STANDARD_INPUT:
        return
    if os.path.isdir(script):
        if not os.path.exists(os.path.join(script, "__main__.py")):
            raise LaunchError(f"{script!r} is a folder without a __main__.py; name the script in it")
    elif not os.path.exists(script):
        raise LaunchError(f"no script {script!r} (looked in {os.path.abspath(os.path.dirname(script))})")
