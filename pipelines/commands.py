"""What a shell command destroys, told from its text by plain rules, so that the fact can be kept without the command (pure).

Destructive is what takes away something that nothing can make again: files deleted in bulk, uncommitted or published work thrown away,
tables, volumes or machines dropped. Deleting what a build makes again (caches, `build`, `node_modules`, what lies under /tmp) is not, nor
is deleting one named file, nor speaking of such a command in a quoted text, a search or a commit message. Rules of thumb on purpose: they
run where the events are made, in microseconds. What a variable or a list from another program holds is unknown and counts as worth keeping.

Takes: a command, or a tool's name and arguments. Gives: whether it destroys, None where there is no command. Leaves out: what programs do
by themselves (`python -c`, make targets, scripts), and whether the command ran.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from pydantic_core import from_json

MAX_CHARS: Final = 20_000
"""Of a command; what is longer writes a file from a here-document."""
_DEPTH: Final = 3
"""A shell in a shell in a shell."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LIKELY: Final = re.compile(
    r"\b(?:rm|rmdir|rd|del|erase|ri|unlink|remove-item|git|dd|mkfs\S*|wipefs|shred|truncate|find|xargs|chmod|chown|kill|drop\w*|delete\w*"
    r"|flush\w*|reset|destroy|docker\S*|podman|kubectl|oc|helm|terraform|tofu|pulumi|aws|gsutil|gcloud|az|gh|npm|crontab|update|shutdown|reboot"
    r"|poweroff|halt|diskpart|format)\b|/dev/", re.IGNORECASE,
)  # fmt: skip
"""A command without any of these destroys nothing that the rules know; most commands end here."""
_HEREDOC: Final = re.compile(r"<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1([^\n]*)\n(.*?)(?:^[ \t]*\2[ \t]*$|\Z)", re.S | re.M)
_KEPT: Final = re.compile(r"\0(\d+)\0")
_PIECE: Final = re.compile(
    r"""(?P<end>\r?\n|;;?|&&|\|\|?|(?<![<>])&(?![>&])|[(){}`])|(?P<space>[ \t]+|\\\r?\n)|(?P<comment>(?<![^\s;|&(])\#[^\n]*)"""
    r"""|(?P<to>(?:\d|&)?>>?\|?)|'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)"""
    r"""|(?P<bare>(?:[^\s'"\\;|&(){}`<>]|<)+)|(?P<other>.)""", re.S,
)  # fmt: skip
_ASSIGNED: Final = re.compile(r"[A-Za-z_]\w*=")
_PREFIXES: Final = _words("sudo doas env nohup time exec command builtin nice ionice stdbuf setsid then do else if while until ! timeout")
_VALUED: Final = _words("-u -g -n -k -s -h -p -C --user --signal")
"""Options of the prefixes that a value follows."""
_SHELLS: Final = _words("sh bash zsh dash ksh fish cmd cmd.exe powershell powershell.exe pwsh")

_MADE_AGAIN: Final = _words(
    "node_modules build dist out target bin obj __pycache__ .pytest_cache .mypy_cache .ruff_cache .cache .tox .nox .venv venv env .eggs "
    "htmlcov coverage .coverage .next .nuxt .turbo .parcel-cache .gradle .terraform .ipynb_checkpoints tmp temp .tmp .temp logs log "
    "cmake-build-debug cmake-build-release deriveddata _build site .hypothesis .nyc_output"
)
"""Names of folders that tools fill again."""
_MADE_ENDINGS: Final = (".pyc", ".pyo", ".o", ".class", ".egg-info", ".tmp", ".log", ".bak", ".swp", ".orig", ".ds_store", "~")
_TEMPORARY: Final = re.compile(r"^(?:/private)?(?:/var)?/tmp/+(?!\*?$)|^/dev/shm/.|\$\{?\w*(?:TMP|TEMP|tmp|temp)\w*\}?", re.ASCII)
_ROOTS: Final = re.compile(r"^(?:/\*?|~/?|\$\{?HOME\}?/?|/(?:etc|usr|var|home|bin|lib|opt|root|boot|tmp)/?\*?)$")
_SQL: Final = re.compile(
    r"\b(?:drop\s+(?:table|database|schema|view|user|role|index|collection|keyspace)|truncate\s+(?:table\s+)?[\w.\"`\[]"
    r"|delete\s+from\s+[\w.\"`\[\]]+\s*(?:;|$)|update\s+[\w.\"`]+\s+set\s+(?:(?!\bwhere\b)[^;])+(?:;|$))"
    r"|\bdropDatabase\(|\.drop\(\)|\.deleteMany\(\s*(?:\{\s*\})?\s*\)",
    re.IGNORECASE,
)  # fmt: skip
_SQL_CHARS: Final = 4_000
_SQL_CLIENTS: Final = _words("psql mysql mariadb sqlite3 sqlcmd duckdb clickhouse-client cockroach cqlsh snowsql bq mongo mongosh")

Words = Sequence[str]


def destroys(command: str | Words) -> bool:
    """Return whether a command, a text or its words as a program gets them, takes away what nothing can make again."""
    if isinstance(command, str):
        return _text(command[:MAX_CHARS], _DEPTH)
    return _segment([word[:MAX_CHARS] for word in command], _DEPTH)


_COMMAND_TOOL: Final = re.compile(r"bash|shell|terminal|command|exec|powershell|(?:^|[._/])(?:run|sh|cmd)(?:$|[._])", re.IGNORECASE)
_FIELDS: Final = ("command", "cmd", "CommandLine", "script", "commands")


def destroys_by_call(name: str, arguments: object) -> bool | None:
    """Return whether a tool call runs a command that destroys; None where it runs no command that can be seen.

    Args:
        name: The tool's, as the policy wrote it.
        arguments: An object, its JSON text, or the command itself, of any type.
    """
    if not _COMMAND_TOOL.search(name[:200]):
        return None
    if isinstance(arguments, str):
        if not arguments.lstrip().startswith("{"):
            return destroys(arguments)
        try:
            arguments = from_json(arguments[:200_000])
        except ValueError:
            return None
    if not isinstance(arguments, Mapping):
        return None
    found = next((arguments[field] for field in _FIELDS if field in arguments), None)
    if isinstance(found, list) and all(isinstance(word, str) for word in found):
        return destroys(found)
    return destroys(found) if isinstance(found, str) else None


def _text(text: str, depth: int) -> bool:
    """Take a script apart into commands, each with its quoted words and here-documents."""
    if depth == 0 or not _LIKELY.search(text):
        return False
    documents: list[tuple[str, str]] = []

    def kept(found: re.Match[str]) -> str:
        documents.append((found[4], found[0]))
        return f" \0{len(documents) - 1}\0 {found[3]}\n"

    text = _HEREDOC.sub(kept, text.replace("\0", " "))
    words: list[str] = []
    word: str | None = None
    for piece in _PIECE.finditer(text):
        kind = piece.lastgroup or ""
        if kind in ("end", "space", "comment", "to"):
            words += [] if word is None else [word]
            word = None
            if kind == "to":
                words.append(">")
            if kind == "end":
                if _segment(_filled(words, documents), depth):
                    return True
                words = []
            continue
        word = (word or "") + piece[kind]
    return _segment(_filled([*words, *([] if word is None else [word])], documents), depth)


def _filled(words: list[str], documents: Sequence[tuple[str, str]]) -> list[str]:
    """Put the here-documents back: each as one word, or as it stood where it is inside a quotation."""

    def back(word: str) -> str:
        if word[:1] == "\0" and word.count("\0") == 2 and word[-1] == "\0":
            return documents[int(word[1:-1])][0]
        return _KEPT.sub(lambda found: documents[int(found[1])][1], word)

    return [back(word) if "\0" in word else word for word in words]


def _segment(words: Words, depth: int) -> bool:
    """Judge one command with its words."""
    if any(a == ">" and re.match(r"/dev/(?:sd|hd|nvme|vd|xvd|disk|mmcblk)", b) for a, b in pairwise(words)):
        return True
    rest = _without_prefix(words)
    if not rest:
        return False
    name = rest[0].rsplit("/", 1)[-1].lower()
    arguments = rest[1:]
    if name in _SHELLS or name in ("eval", "ssh", "xargs"):
        return _inner(name, arguments, depth)
    if name in _SQL_CLIENTS:
        return bool(_SQL.search("\n".join(arguments)[:_SQL_CHARS]))
    judge = _JUDGES.get(name) or (_always if name.startswith("mkfs") else None)
    return judge is not None and judge(arguments)


def _without_prefix(words: Words) -> Words:
    at, wrapped = 0, ""
    while at < len(words):
        word = words[at]
        if _ASSIGNED.match(word):
            at += 1
        elif word in _PREFIXES:
            wrapped = word
            at += 1
        elif wrapped and word.startswith("-"):
            at += 2 if word in _VALUED else 1
        elif wrapped == "timeout" and word[:1].isdigit():
            at += 1
        else:
            break
    return words[at:]


def _inner(name: str, arguments: Words, depth: int) -> bool:
    """Judge what another program is told to run."""
    if name == "xargs":
        plain = [word for word in arguments if not word.startswith("-") and not word.isdigit() and word != "{}"]
        at = arguments.index(plain[0]) if plain else len(arguments)
        return _segment([*arguments[at:], "$LISTED"], depth - 1) if depth > 1 else False
    if name == "ssh":
        return any(_text(" ".join(arguments[at:]), depth - 1) for at in range(1, min(len(arguments), 6)))
    if name == "eval":
        return _text(" ".join(arguments), depth - 1)
    for at, word in enumerate(arguments):
        if word.lower() in ("/c", "-command") or re.fullmatch(r"-[a-z]*c", word):
            joined = " ".join(arguments[at + 1 :]) if word.lower() in ("/c", "-command") else (arguments[at + 1 : at + 2] or [""])[0]
            return _text(joined, depth - 1)
    return any("\n" in word and _text(word, depth - 1) for word in arguments)  # a here-document


def _always(_arguments: Words) -> bool:
    return True


def _has(arguments: Words, short: str, *long: str) -> bool:
    """Return whether an option is given: a letter inside a group of short options, or a long name."""
    return any(
        word in long
        or (word[:1] == "-" and word[:2] != "--" and bool(re.match(r"-[A-Za-z]{1,4}$", word)) and any(c in word for c in short))
        for word in arguments
    )


def _operands(arguments: Words) -> list[str]:
    found, options = [], True
    for word in arguments:
        if word == ">":
            break
        if options and word == "--":
            options = False
        elif not (options and word.startswith("-")):
            found.append(word)
    return found


def _made_again(path: str) -> bool:
    if ".." in path.split("/") or _ROOTS.match(path):
        return False
    parts = [part.lower() for part in path.replace("\\", "/").strip("/").split("/") if part not in ("", ".", "*", "**")]
    ending = parts[-1] if parts else ""
    return bool(_TEMPORARY.search(path)) or any(part in _MADE_AGAIN for part in parts) or ending.endswith(_MADE_ENDINGS)


def _rm(arguments: Words) -> bool:
    bulk = _has(arguments, "rR", "--recursive", "-Recurse", "-recurse", "/s", "/S")
    operands = [word for word in _operands(arguments) if word.lower() not in ("/s", "/q", "/f")]
    kept = [word for word in operands if not _made_again(word)]
    return bool(kept) and (bulk or any(word.rsplit("/", 1)[-1] in ("*", "*.*", ".*") for word in kept))


def _rmdir(arguments: Words) -> bool:
    return any(word.lower() == "/s" for word in arguments) and _rm(arguments)


def _find(arguments: Words) -> bool:
    named = [b.strip("*") for a, b in pairwise(arguments) if a in ("-name", "-iname", "-path")]
    if named and all(_made_again(name) for name in named):
        return False
    runs = [b.rsplit("/", 1)[-1] for a, b in pairwise(arguments) if a in ("-exec", "-execdir", "-ok")]
    places = [word for word in arguments[:1] if not word.startswith("-")]
    if places and all(_made_again(place) for place in places):
        return False
    return "-delete" in arguments or any(name in ("rm", "shred", "unlink") for name in runs)


def _git(arguments: Words) -> bool:
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] in ("-C", "-c", "--git-dir", "--work-tree") else 1
    verb, rest = (arguments[at] if at < len(arguments) else ""), arguments[at + 1 :]
    if _has(rest, "", "--dry-run") or (verb == "clean" and _has(rest, "n")):
        return False
    match verb:
        case "reset":
            return "--hard" in rest
        case "clean":
            return _has(rest, "f", "--force")
        case "checkout" | "switch":
            return "." in rest or ("--" in rest and rest[-1] != "--") or _has(rest, "f", "--force", "--discard-changes")
        case "restore":
            return not _has(rest, "S", "--staged") or _has(rest, "W", "--worktree")
        case "stash":
            return bool({"drop", "clear"} & set(rest[:1]))
        case "push":
            return _has(rest, "fd", "--force", "--mirror", "--delete", "--prune") or any(word[:1] in "+:" for word in _operands(rest)[1:])
        case "branch":
            return _has(rest, "D") or (_has(rest, "d", "--delete") and _has(rest, "f", "--force"))
        case "worktree":
            return rest[:1] == ["remove"] and _has(rest, "f", "--force")
        case "reflog":
            return rest[:1] in (["expire"], ["delete"])
        case "update-ref":
            return _has(rest, "d", "--delete")
        case _:
            return verb in ("filter-branch", "filter-repo")


def _over_root(arguments: Words) -> bool:
    return _has(arguments, "R", "--recursive") and any(_ROOTS.match(word) for word in _operands(arguments))


def _container(arguments: Words) -> bool:
    words = [word for word in arguments if not word.startswith("-")]
    pruned = words[:2] in (["system", "prune"], ["volume", "rm"], ["volume", "prune"])
    return pruned or ("down" in words and ("-v" in arguments or "--volumes" in arguments))


def _given(*verbs: str) -> Callable[[Words], bool]:
    """Return a rule: one of these words is given, and it is no rehearsal."""
    return lambda arguments: any(word in verbs for word in arguments) and not any(word.startswith("--dry-run") for word in arguments)


def _aws(arguments: Words) -> bool:
    words = [word for word in arguments if not word.startswith("-")]
    if words[:1] == ["s3"]:
        return words[1:2] == ["rb"] or (words[1:2] == ["rm"] and "--recursive" in arguments) or "--delete" in arguments
    return any(word.startswith(("delete-", "terminate-")) for word in words[1:2]) and "--dry-run" not in arguments


_JUDGES: Final[Mapping[str, Callable[[Words], bool]]] = {
    **dict.fromkeys(("rm", "del", "erase", "ri", "remove-item"), _rm),
    **dict.fromkeys(("rmdir", "rd"), _rmdir),
    **dict.fromkeys(("shred", "wipefs", "dropdb", "shutdown", "reboot", "poweroff", "halt", "diskpart"), _always),
    "find": _find,
    "git": _git,
    "dd": lambda arguments: any(re.match(r"of=/dev/(?!null|zero|stdout|shm)", word) for word in arguments),
    "truncate": lambda arguments: bool({"-s0", "--size=0"} & set(arguments)) or ("-s" in arguments and "0" in arguments),
    **dict.fromkeys(("chmod", "chown", "chgrp"), _over_root),
    "kill": lambda arguments: arguments[-1:] == ["-1"] and len(arguments) > 1,
    "format": lambda arguments: bool(re.fullmatch(r"[A-Za-z]:", (arguments or [""])[0])),
    **dict.fromkeys(("docker", "podman", "docker-compose"), _container),
    **dict.fromkeys(("kubectl", "oc"), _given("delete")),
    "helm": _given("uninstall", "delete"),
    **dict.fromkeys(("terraform", "tofu", "pulumi"), _given("destroy", "-destroy")),
    "aws": _aws,
    "gsutil": lambda arguments: "rb" in arguments or ("rm" in arguments and _has(arguments, "rR")),
    **dict.fromkeys(("gcloud", "az", "gh"), _given("delete")),
    "npm": _given("unpublish"),
    "crontab": lambda arguments: "-r" in arguments,
    "redis-cli": lambda arguments: any(word.lower() in ("flushall", "flushdb") for word in arguments),
    **dict.fromkeys(("rails", "rake"), _given("db:drop", "db:reset", "db:purge")),
    "prisma": _given("reset", "--force-reset"),
}
"""Program -> rule over its arguments."""
