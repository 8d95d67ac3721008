import shutil
import subprocess
from pathlib import Path

import pytest

from littrainer.cli import COMMANDS, main
from littrainer.commands.completion import vocabulary
from littrainer.commands.completion_scripts import SCRIPTS
from tests.compat.processes import environment, facts_of

# A line whose last word is completed -> some of the words that are offered, and one that is not.
OFFERS: list[tuple[str, set[str], str]] = [
    ("littrainer ", {*COMMANDS}, "train.py"),
    ("littrainer re", {"report"}, "run"),
    ("littrainer --v", {"--version"}, "--help"),
    ("littrainer run --d", {"--devices"}, "--nodes"),
    ("littrainer run --strategy ", {"ddp", "fsdp", "deepspeed"}, "train.py"),
    ("littrainer run ", {"train.py", "two words.py"}, "--devices"),
    ("littrainer run --devices 2 tr", {"train.py"}, "two words.py"),
    ("littrainer run train.py --learn", {"--learning_rate"}, "--devices"),
    ("littrainer run train.py --eval_strategy ", {"no", "steps", "epoch"}, "train.py"),
    ("littrainer run train.py --bf16 ", {"true", "false"}, "train.py"),
    ("littrainer run train.py ", {"rows.json"}, "run"),
    ("littrainer run -m ", set(), "train.py"),
    ("littrainer run -m package.train --learn", {"--learning_rate"}, "--devices"),
    ("littrainer explain --a", {"--as-code", "--adam_beta1"}, "--learning_rate"),
    ("littrainer explain train.py --lr_scheduler_t", {"--lr_scheduler_type"}, "--as-code"),
    ("littrainer explain --lr_scheduler_type cos", {"cosine", "cosine_with_restarts"}, "linear"),
    ("littrainer report ", {"runs"}, "train.py"),
    ("littrainer report --scale l", {"linear", "log"}, "auto"),
    ("littrainer completion ", {*SCRIPTS}, "train.py"),
    ("littrainer env --", {"--json"}, "--version"),
]
# Calls the function as bash does when Tab is pressed, for each line that it reads.
ASK_BASH = """
source "$1"
while IFS= read -r COMP_LINE; do
    read -r -a COMP_WORDS <<< "$COMP_LINE"
    [[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    COMPREPLY=()
    _littrainer
    for word in "${COMPREPLY[@]}"; do printf '%s|' "$word"; done
    printf '\\n'
done
"""
ASK_FISH = """
source $argv[1]
while read -l line
    for offer in (complete -C "$line"); printf '%s|' (string split \\t -- $offer)[1]; end
    printf '\\n'
end
"""


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Files to be completed, and each shell's script in `scripts`."""
    for name in ("train.py", "two words.py", "rows.json"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    for shell in SCRIPTS:
        assert main(["completion", shell]) == 0
        (tmp_path / f"script.{shell}").write_text(capsys.readouterr().out)
    return tmp_path


def offered(command: list[str], folder: Path) -> list[set[str]]:
    lines = "".join(f"{line}\n" for line, _, _ in OFFERS)
    done = subprocess.run(
        command, input=lines, cwd=folder, env=environment(HOME=str(folder)), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [{word.removesuffix("/") for word in line.split("|") if word} for line in done.stdout.splitlines()]


def check(answers: list[set[str]]) -> None:
    assert len(answers) == len(OFFERS)
    for (line, expected, absent), answer in zip(OFFERS, answers, strict=True):
        assert expected <= answer, (line, answer)
        assert absent not in answer, (line, answer)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_values_arguments_and_files(folder: Path) -> None:
    check(offered(["bash", "--norc", "-c", ASK_BASH, "bash", "script.bash"], folder))


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_a_value_behind_an_equals_sign(folder: Path) -> None:
    # bash takes the sign for a word of its own.
    ask = "source script.bash; COMP_WORDS=(littrainer run --strategy = f); COMP_CWORD=4; _littrainer; echo $COMPREPLY"
    done = subprocess.run(["bash", "--norc", "-c", ask], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("fsdp\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_options_values_arguments_and_files(folder: Path) -> None:
    check(offered(["fish", "--no-config", "-c", ASK_FISH, "script.fish"], folder))


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_one_that_the_shell_can_read(folder: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", f"script.{shell}"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_of_every_command_is_in_every_script(folder: Path) -> None:
    words = vocabulary()
    options = [*words.options, *words.arguments, *(option for command in words.commands for option in command.options)]
    assert len(options) > 130
    for shell, dashes in (("bash", "--"), ("zsh", "--"), ("fish", "-l ")):
        text = (folder / f"script.{shell}").read_text()
        names = [name for option in options for name in option.names if name.startswith("--")]
        assert [name for name in names if f"{dashes}{name[2:]}" not in text] == []
        assert "@" not in text.replace('"$@"', "").replace("(@f)", "").replace("[@]", "")


def test_neither_torch_nor_lightning_is_loaded_for_it(tmp_path: Path) -> None:
    loaded = facts_of(
        "import json, sys, io, contextlib\nfrom littrainer.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    statuses = [main(['completion', shell]) for shell in ('bash', 'zsh', 'fish')]\n"
        "print(json.dumps([statuses, sorted({'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules))]))\n",
        tmp_path,
    )
    assert loaded == [[0, 0, 0], []]
