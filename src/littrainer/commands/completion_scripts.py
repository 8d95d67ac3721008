"""The scripts that `littrainer completion` prints, made from the words of the command line.

In each shell the place on the command line is found first: `start`, a command, or `arguments`, behind a script. Tables
say which options a place has, which words may follow an option, and which options take a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from littrainer.commands.completion_words import (
    CHOICES,
    FOLDERS,
    SCRIPT,
    SCRIPT_OR_ARGUMENTS,
    CommandWords,
    Option,
    Vocabulary,
)

ARGUMENTS, START = "arguments", "start"
WITH_SCRIPT = (SCRIPT, SCRIPT_OR_ARGUMENTS)
MODULE_OPTION = "-m"

# Functions that bash and zsh read alike; a place and an option before the cursor are their arguments.
TABLES = """\
_littrainer_options() {
    case "$1" in
@OPTIONS@
    esac
}
_littrainer_choices() {
    case "$1 $2" in
@CHOICES@
    esac
}
_littrainer_takes_value() {
    case "$1 $2" in
@VALUED@) return 0 ;;
    esac
    return 1
}
"""

BASH = """\
# Completion of littrainer's commands in bash, printed by `littrainer completion bash`.
@TABLES@_littrainer_offer() {
    local word
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$@" -- "$current")
}
_littrainer_offer_files() {
    compopt -o filenames 2> /dev/null
    _littrainer_offer "$@"
}
_littrainer() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" place=start position word choices
    COMPREPLY=()
    # `--option=value` arrives as three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    for (( position = 1; position < COMP_CWORD; position++ )); do
        word="${COMP_WORDS[position]}"
        case "$place" in
            start)
                case "$word" in
                    @COMMANDS@) place="$word" ;;
                esac ;;
            @WITH_SCRIPT@)
                if _littrainer_takes_value "$place" "$word"; then
                    [[ ${COMP_WORDS[position+1]} == "=" ]] && (( position++ ))
                    (( position++ ))
                    [[ $word == -m ]] && (( position < COMP_CWORD )) && place=arguments
                elif [[ $word != -* ]]; then
                    place=arguments
                fi ;;
        esac
    done
    choices="$(_littrainer_choices "$place" "$previous")"
    if [[ $current == -* ]]; then
        _littrainer_offer -W "$(_littrainer_options "$place")"
    elif [[ -n $choices ]]; then
        _littrainer_offer -W "$choices"
    elif _littrainer_takes_value "$place" "$previous"; then
        [[ $previous == -m ]] || _littrainer_offer_files -f
    else
        case "$place" in
            start) _littrainer_offer -W "@COMMAND_WORDS@" ;;
            @WITH_SCRIPT@) _littrainer_offer_files -f -X '!*.py'; _littrainer_offer_files -d ;;
            @WITH_FOLDERS@) _littrainer_offer_files -d ;;
            arguments) _littrainer_offer_files -f ;;
            *) _littrainer_offer -W "$(_littrainer_choices "$place" "")" ;;
        esac
    fi
}
complete -F _littrainer littrainer
"""

ZSH = """\
#compdef littrainer
# Completion of littrainer's commands in zsh, printed by `littrainer completion zsh`.
@TABLES@_littrainer() {
    local place=start position word previous="${words[CURRENT-1]}"
    local -a options choices
    for (( position = 2; position < CURRENT; position++ )); do
        word="${words[position]}"
        case "$place" in
            start)
                case "$word" in
                    @COMMANDS@) place="$word" ;;
                esac ;;
            @WITH_SCRIPT@)
                if _littrainer_takes_value "$place" "$word"; then
                    (( position++ ))
                    [[ $word == -m ]] && (( position < CURRENT )) && place=arguments
                elif [[ $word != -* ]]; then
                    place=arguments
                fi ;;
        esac
    done
    if [[ ${words[CURRENT]} == --*=* ]]; then
        previous="${words[CURRENT]%%=*}"
        compset -P '*='
    elif [[ ${words[CURRENT]} == -* ]]; then
        options=("${(@f)$(_littrainer_options "$place")}")
        _describe -o option options
        return
    fi
    choices=(${=$(_littrainer_choices "$place" "$previous")})
    if (( $#choices )); then
        compadd -a choices
    elif _littrainer_takes_value "$place" "$previous"; then
        [[ $previous == -m ]] || _files
    else
        case "$place" in
            start)
                options=(
@COMMAND_WORDS@
                )
                _describe command options ;;
            @WITH_SCRIPT@) _files -g '*.py' ;;
            @WITH_FOLDERS@) _files -/ ;;
            arguments) _files ;;
            *) choices=(${=$(_littrainer_choices "$place" "")}); compadd -a choices ;;
        esac
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _littrainer "$@"
else
    compdef _littrainer littrainer
fi
"""

FISH = """\
# Completion of littrainer's commands in fish, printed by `littrainer completion fish`.
function __littrainer_place
    set -l words (commandline -opc)
    set -l place start
    set -l is_value no
    for word in $words[2..]
        if test $is_value != no
            test $is_value = module; and set place arguments
            set is_value no
            continue
        end
        switch "$place"
            case start
                contains -- $word @COMMANDS@; and set place $word
            case @WITH_SCRIPT@
                if test "$word" = -m
                    set is_value module
                else if contains -- "$place $word" @VALUED@
                    set is_value yes
                else if not string match -q -- '-*' "$word"
                    set place arguments
                end
        end
    end
    echo $place
end
function __littrainer_at
    contains -- (__littrainer_place) $argv
end
complete -c littrainer -f
@LINES@
"""


def bash(words: Vocabulary) -> str:
    """The script for bash."""
    return _filled(BASH, words, _bash_options, " ".join(command.name for command in words.commands))


def zsh(words: Vocabulary) -> str:
    """The script for zsh."""
    described = "\n".join(" " * 20 + _zsh_word(command.name, command.about) for command in words.commands)
    return _filled(ZSH, words, _zsh_options, described)


def fish(words: Vocabulary) -> str:
    """The script for fish."""
    own_values = [
        _quoted(f"{command.name} {name}")
        for command in words.commands
        for option in command.options
        if option.takes_value and command.operands in WITH_SCRIPT
        for name in option.names
        if name != MODULE_OPTION
    ]
    texts = {
        "COMMANDS": " ".join(command.name for command in words.commands),
        "WITH_SCRIPT": " ".join(_names(words, *WITH_SCRIPT)),
        "VALUED": " ".join(own_values),
        "LINES": "\n".join(_fish_lines(words)),
    }
    return _replaced(FISH, texts)


SCRIPTS: dict[str, Callable[[Vocabulary], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _filled(template: str, words: Vocabulary, shown: Callable[[Iterable[Option]], str], command_words: str) -> str:
    """The script for a shell of Bourne's kind; `shown` writes options as its function `_littrainer_options` prints."""
    places = _places(words)
    choices = [
        (f"{place} {name}", option.choices)
        for place, options in places.items()
        for option in options
        if option.choices
        for name in option.names
    ]
    choices += [(f"{command.name} ", command.choices) for command in words.commands if command.operands == CHOICES]
    valued = [
        _quoted(f"{place} {name}")
        for place, options in places.items()
        for option in options
        if option.takes_value
        for name in option.names
    ]
    indent = " " * 8
    texts = {
        "TABLES": TABLES,
        "OPTIONS": "\n".join(f"{indent}{place}) {shown(options)} ;;" for place, options in places.items()),
        "CHOICES": "\n".join(f"{indent}{_quoted(case)}) echo {_quoted(' '.join(found))} ;;" for case, found in choices),
        "VALUED": "|\\\n".join(f"{indent}{case}" for case in valued),
        "COMMANDS": "|".join(command.name for command in words.commands),
        "WITH_SCRIPT": "|".join(_names(words, *WITH_SCRIPT)),
        "WITH_FOLDERS": "|".join(_names(words, FOLDERS)),
        "COMMAND_WORDS": command_words,
    }
    return _replaced(template, texts)


def _places(words: Vocabulary) -> dict[str, tuple[Option, ...]]:
    """Place -> the options that may stand there."""
    own = {command.name: command.options + _further(command, words) for command in words.commands}
    return {START: words.options, **own, ARGUMENTS: words.arguments}


def _further(command: CommandWords, words: Vocabulary) -> tuple[Option, ...]:
    return words.arguments if command.operands == SCRIPT_OR_ARGUMENTS else ()


def _names(words: Vocabulary, *operands: str) -> list[str]:
    return [command.name for command in words.commands if command.operands in operands]


def _bash_options(options: Iterable[Option]) -> str:
    return f"echo {_quoted(' '.join(name for option in options for name in option.names))}"


def _zsh_options(options: Iterable[Option]) -> str:
    shown = " ".join(_zsh_word(name, option.about) for option in options for name in option.names)
    return f"print -rl -- {shown}"


def _zsh_word(name: str, about: str) -> str:
    return _quoted(f"{name}:{about}")


def _fish_lines(words: Vocabulary) -> Iterator[str]:
    for option in words.options:
        yield _fish_option(option, START)
    for command in words.commands:
        yield f"complete -c littrainer -n '__littrainer_at start' -a {command.name} -d {_fish_quoted(command.about)}"
        for option in command.options:
            yield _fish_option(option, command.name)
        if command.choices:
            offered = _fish_quoted(" ".join(command.choices))
            yield f"complete -c littrainer -n '__littrainer_at {command.name}' -a {offered}"
    for option in words.arguments:
        yield _fish_option(option, *_names(words, SCRIPT_OR_ARGUMENTS), ARGUMENTS)
    scripts, folders = " ".join(_names(words, *WITH_SCRIPT)), " ".join(_names(words, FOLDERS))
    yield f"complete -c littrainer -n '__littrainer_at {scripts}' -k -a '(__fish_complete_suffix .py)'"
    yield f"complete -c littrainer -n '__littrainer_at {folders}' -a '(__fish_complete_directories)'"
    yield f"complete -c littrainer -n '__littrainer_at {ARGUMENTS}' -F"


def _fish_option(option: Option, *places: str) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    value = ""
    if option.choices:
        # With a list of words no files are offered beside them.
        value = f" -x -a {_fish_quoted(' '.join(option.choices))}"
    elif option.takes_value:
        value = " -x" if MODULE_OPTION in option.names else " -r -F"
    about = f" -d {_fish_quoted(option.about)}" if option.about else ""
    return f"complete -c littrainer -n '__littrainer_at {' '.join(places)}' {' '.join(names)}{value}{about}"


def _replaced(template: str, texts: dict[str, str]) -> str:
    for name, text in texts.items():
        template = template.replace(f"@{name}@", text)
    return template


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
