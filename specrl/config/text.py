"""Restrictions on the text of settings, which becomes options of sbatch, shell words and log lines.

`check_text` checks the whole configuration before anything else reads it, so that no field can be forgotten.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""The form of run names and of other parts of paths."""
SHOWN_CHARACTERS = 80
"""How many characters of a wrong value its message repeats."""
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
"""Refused Unicode categories: controls (NUL, ESC, line ends), undecodable bytes, U+2028, U+2029."""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that make a terminal display a line in another order."""
VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")
LINE_CHARACTERS = "\n\t"
ENVIRONMENT_FILE = "put it into a file that only you can read, as NAME=VALUE, and name that: cluster.environment_file"

SECRET_NAME = re.compile(
    r".*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY|SSHPASS)|.+_(?:KEY|PWD|PASS)|(?:.+_)?CREDENTIALS?",
    re.IGNORECASE,
)
"""Names of variables and settings that hold secrets: HF_TOKEN, PGPASSWORD, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY."""
_NO_SECRET = r"(?:~|\.{1,2})?/[\w.@%:,/-]*|\d{1,5}|(?i:true|false|yes|no|on|off)"
"""Harmless values: paths, small numbers, switches, as in MASTER_KEY=~/.ssh/key, PAD_TOKEN=0."""
_END = r"[\"']?(?:[\s;&|)]|$)"
_TEXT = r"[\"']?(?:[^\s\"'$`;&|]|\$\{\w+:?[-=+][^\s}$`])|\$'"
"""The start of a literal value, or of the default in `${NAME:-text}`."""
_STANDS_THERE = rf"(?![\"']?(?:{_NO_SECRET}){_END})(?={_TEXT})"
ASSIGNMENT = re.compile(
    rf"(?<![\w$])([A-Za-z_]\w*)\+?={_STANDS_THERE}|\b(?:setenv|set)(?: +-\w+)* +([A-Za-z_]\w*) +{_STANDS_THERE}"
)
"""A shell variable that is set to a literal value, rather than to that of a variable or program."""
OPTION = re.compile(r"--?(?:[\w-]*-)?(?:token|secret|password|passwd|passphrase|api-?key)[= ]+(?=[\"']?[^\s\"'$`;&|-])")
SECRET = re.compile(
    r"(?<![A-Za-z0-9-])(?:"
    r"hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-(?:[a-z0-9]+-)*[A-Za-z0-9_]{16,}"  # OpenAI, Anthropic
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}"  # AWS
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abprs]-[\w-]{10,}"  # Slack
    r"|AIza[\w-]{30,}"  # Google
    r"|nvapi-[\w-]{16,}"  # NVIDIA
    r"|eyJ[\w-]{10,}\.[\w-]{10,}"  # JSON web tokens
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    r"|(?i:authorization: *(?:basic|bearer|token) +)(?=[^\s\"'$`])"
    r"|\bwandb +login +(?:-\S+ +)*(?=[0-9a-f]{16})"
    r"|\bcurl\b.* (?:-u|--user)[ =]*(?=[\"']?[^\s\"'$:]+:[^\s\"'$])"
    r"|\blogin +\S+ +password +(?=[^\s\"'$`])"  # .netrc
)
"""Secrets recognised by their form, anywhere."""
IN_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://[^\s/@:$]*:(?=[^\s/@$])[^\s/@]+@|https?://[^\s/@:$]+@")
"""A password or token in an address: scheme://user:password@host, https://token@host."""


MULTILINE = ("data.template", "data.system_prompt", "*.reward.*.parameters.template", "sampling.stop.*")
"""The settings whose text may have several lines; all others are a single line."""


def check_text(data: Any) -> None:
    """Refuse control characters and secrets in all texts of a configuration, including keys."""
    if problems := list(dict.fromkeys(_problems(data, ""))):
        raise ValueError("\n".join(problems))


def _problems(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, member in value.items():
            wrong = list(_problems_of(str(name), f"{key or 'config'}: the key", multiline=False))
            yield from wrong or _problems(member, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            yield from _problems(member, f"{key}.{number}")
    elif isinstance(value, str | Path):
        yield from _problems_of(str(value), f"{key} =", multiline=any(fnmatchcase(key, name) for name in MULTILINE))


def _problems_of(text: str, what: str, *, multiline: bool) -> Iterator[str]:
    kept = LINE_CHARACTERS if multiline else ""
    wrong = next((character for character in text if is_control(character) and character not in kept), None)
    if wrong is not None:
        allowed = "printable characters, tabs and line ends" if multiline else "one line of printable characters"
        yield f"{what} {shown(text)} has the control character {wrong!r}; allowed: {allowed}"
    elif SECRET.search(text):
        yield f"{what} {shown(redacted(text))} looks like a secret, and the configuration is stored: {ENVIRONMENT_FILE}"


def is_control(character: str) -> bool:
    """Whether a character is invisible but changes what is shown, read or run."""
    return unicodedata.category(character) in UNPRINTABLE or character in REORDERING


def shown(text: str) -> str:
    """Shorten a text to one line, with unprintable characters escaped."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")


def secret_name(line: str) -> str | None:
    """The name of the secret in a shell line or a command's word, or None."""
    return next((name for _, name in _secrets(line)), None)


def redacted(text: str) -> str:
    """Cut a text before its first secret."""
    first = min((place for place, _ in _secrets(text)), default=None)
    return text if first is None else f"{text[:first]}***"


def _secrets(text: str) -> Iterator[tuple[int, str]]:
    for found in ASSIGNMENT.finditer(text):
        if SECRET_NAME.fullmatch(name := found[1] or found[2]):
            yield found.end(), name
    for found in OPTION.finditer(text):
        yield found.end(), found[0].rstrip("= ")
    for pattern in (SECRET, IN_ADDRESS):
        for found in pattern.finditer(text):
            yield found.start(), "a token, a key or a password"


def _word(text: str) -> str:
    wrong = "is empty" if not text else "begins with -" if text.startswith("-") else "has a backslash"
    if not text or text.startswith("-") or "\\" in text:
        raise ValueError(
            f"{shown(text)} {wrong}; allowed: one line without backslashes that begins with another character"
        )
    return text


Word = Annotated[str, AfterValidator(_word)]
"""A value passed to Slurm or a program as a word. A leading - could make it an option, and sbatch treats a backslash
between quotes differently than a shell."""


def _slurm_name(text: str) -> str:
    if any(character.isspace() for character in text):
        raise ValueError(f"{shown(text)} has a blank; allowed: names without blanks, several with commas between them")
    return text


SlurmName = Annotated[Word, AfterValidator(_slurm_name)]
"""A name set by Slurm's administrators, such as a partition's."""


def expanded(place: object) -> object:
    """Expand `$VARIABLES` and `~` in a path, as a shell would."""
    if not isinstance(place, str | Path):
        return place
    if not str(place).strip():
        raise ValueError("an empty path is none; leave the key out, or write . for the present folder")
    path = os.path.expanduser(os.path.expandvars(place))  # noqa: PTH111 - a hub id is not a path
    if (unknown := VARIABLE.search(path)) is not None:
        raise ValueError(f"{shown(str(place))}: the variable {unknown[0]} is not set")
    if path.startswith("~"):
        raise ValueError(f"{shown(str(place))}: there is no such user, or no HOME")
    return path


UserPath = Annotated[Path, BeforeValidator(expanded)]
"""The path of a file or folder; variables and `~` are expanded where the run is started."""
Places = Annotated[
    tuple[UserPath, ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str | Path) else given),
    Field(min_length=1),
]
"""One or several paths, patterns such as `*.jsonl`, or data sets of the hub; a single one needs no list."""
UserPlace = Annotated[str, BeforeValidator(expanded)]
"""A path or a hub id."""
UserWord = Annotated[Word, BeforeValidator(lambda given: given if "://" in str(given) else expanded(given))]
"""A word of a command, which may also be the name of a program, or an address: NGC's user is called `$oauthtoken`."""


def _path_without(refused: str) -> AfterValidator:
    def check(path: Path) -> Path:
        wrong = next((character for character in str(path) if character in refused), None)
        if wrong is not None:
            raise ValueError(f"{shown(str(path))} has {wrong!r}; allowed: a path without any of {' '.join(refused)}")
        return path

    return AfterValidator(check)


PlainPath = Annotated[UserPath, _path_without(":,\\")]
"""A path for use in a list of import paths or mounts, or in the pattern of a log's name."""
RunsPath = Annotated[UserPath, _path_without(":,?\\")]
"""The same for the runs folder, whose path is part of the address of MLflow's database."""


def _setup_line(line: str) -> str:
    if line.lstrip().startswith("#SBATCH"):
        raise ValueError(
            f"{shown(redacted(line))} is an option of sbatch; allowed: a line of a shell, and cluster.sbatch"
        )
    if (name := secret_name(line)) is not None:
        raise ValueError(
            f"{shown(redacted(line))} looks like a secret ({name}), and the configuration is stored: {ENVIRONMENT_FILE}"
        )
    return line


SetupLine = Annotated[str, AfterValidator(_setup_line)]
"""A shell line without secrets and options of sbatch."""
