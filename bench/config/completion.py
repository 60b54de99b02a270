"""Tab completion of the ``decodebench`` command: sub-commands, groups and their choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.errors import UserError

SHELLS = ("bash", "zsh")
_SCRIPT = """\
_decodebench() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} key= choices
    if [[ $current == = ]]; then key=$before current=
    elif [[ $before == = ]]; then key=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    case $key in
{cases}
        '') choices="{words}" ;;
    esac
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace 2>/dev/null; fi
}}
complete -F _decodebench decodebench"""


def script(shell: str, commands: Iterable[str], groups: Mapping[str, Sequence[str]], flags: Iterable[str]) -> str:
    """What a shell has to read: ``eval "$(decodebench completion bash)"``.

    Raises:
        UserError: another shell.
    """
    if shell not in SHELLS:
        raise UserError(f"completion needs a shell, {' or '.join(SHELLS)}, got '{shell}'.")
    cases = "\n".join(f'        {group}) choices="{" ".join(choices)}" ;;' for group, choices in groups.items())
    words = " ".join([*commands, *(f"{group}=" for group in groups), *flags])
    text = _SCRIPT.format(cases=cases, words=words)
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
