"""Which shell commands destroy something: labelled by hand, one row a rule and the trap beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.commands import destroys, destroys_by_call

DESTROYS = [
    "rm -rf src", "rm -rf /", "cd app && rm -r -f ./lib", "sudo -u root rm -rf /etc", "rm -rf *", "rm *", 'rm -rf "$DIR"',
    "rm -rf /tmp/*", "rm -rf build/../src", "git reset --hard HEAD~3", "git clean -fdx", "git checkout -- src/a.py",
    "git checkout HEAD -- a", "git checkout .", "git restore a.py", "git push --force origin main", "git push origin +main",
    "git push origin :old", "git -C repo push -f", "git branch -D x", "git stash clear", "git worktree remove --force w",
    "git reflog expire --all", "git filter-branch -f", "find . -name '*.py' -delete", "find src -type f -exec rm {} +",
    "ls | xargs rm -rf", "dd if=/dev/zero of=/dev/sda", "mkfs.ext4 /dev/sdb1", "cat x > /dev/sda", "shred key", "truncate -s 0 data.csv",
    "chmod -R 777 /", "kill -9 -1", "crontab -r", "psql -c 'DROP TABLE users'", 'sqlite3 a.db "delete from users;"',
    "mysql -e 'update users set admin=1'", "psql db <<EOF\nDROP TABLE a;\nEOF", "dropdb prod", "redis-cli FLUSHALL",
    "bash -lc 'rm -rf src'", "bash <<'EOF'\nrm -rf src\nEOF", 'eval "rm -rf src"', "ssh host 'rm -rf data'", "docker system prune -af",
    "docker compose down -v", "kubectl delete ns prod", "helm uninstall web", "terraform destroy -auto-approve",
    "aws s3 rm s3://b --recursive", "aws ec2 terminate-instances --instance-ids i", "gsutil rm -r gs://b", "gh repo delete a/b",
    "npm unpublish x", "FOO=1 timeout 5 rm -rf data", "if true; then rm -rf data; fi", "echo $(rm -rf data)", "rd /s /q src",
    "powershell -Command Remove-Item -Recurse -Force src", "rails db:drop",
]  # fmt: skip
HARMLESS = [
    "rm -rf build", "rm -rf node_modules && npm install", "rm a.txt", "rm -f src/a.py", "rm -rf /tmp/foo", 'rm -rf "$TMPDIR/x"',
    "rm -rf dist/*", "rm -f *.pyc", "rm -rf ./__pycache__ .pytest_cache", "find . -name '*.pyc' -delete",
    "find . -name __pycache__ -exec rm -rf {} +", "find build -type f -delete", "echo 'rm -rf /'", 'grep -rn "git reset --hard" .',
    "git commit -m 'rm -rf src; DROP TABLE x'", "git reset HEAD a", "git checkout -b new", "git checkout main",
    "git restore --staged a.py", "git push origin main", "git branch -d x", "git push --force-with-lease", "git clean -n",
    "git clean -fdn", "git stash", "git log --format=%H", "cat > run.sh <<EOF\nrm -rf src\nEOF", "psql -c 'select * from a'",
    'sqlite3 a.db "delete from users where id=1"', "mysql -e 'update users set admin=1 where id=2'", "python -c 'print(1)'",
    "# rm -rf src", "ls; # rm -rf src", "docker ps", "docker rm -f web", "kubectl get pods", "kubectl delete pod x --dry-run=client",
    "make clean", "chmod -R 755 scripts", "kill -9 123", "npm run format", "dd if=a of=/dev/null", "", "truncate -s 10M disk.img",
    "Remove-Item -Force a.txt",
]  # fmt: skip


@pytest.mark.parametrize("command", DESTROYS)
def test_what_takes_away_what_nothing_makes_again_is_destructive(command: str) -> None:
    assert destroys(command)


@pytest.mark.parametrize("command", HARMLESS)
def test_caches_single_files_rehearsals_and_quoted_commands_are_not(command: str) -> None:
    assert not destroys(command)


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        ("Bash", {"command": "rm -rf src"}, True), ("Bash", {"command": "ls"}, False),
        ("run_terminal", '{"command": "git clean -fd"}', True),
        ("shell", '{"command": ["bash", "-lc", "rm -rf src"]}', True),
        ("exec_command", {"cmd": "ls"}, False), ("bash", "rm -rf src", True),
        ("str_replace_editor", {"command": "view"}, None), ("run_terminal", '{"comm', None), ("read_file", {"path": "rm -rf src"}, None),
        ("Bash", {"command": 3}, None), ("Bash", {"command": ["rm", 1]}, None), ("Bash", None, None),
        ("prune", {"command": "rm -rf /"}, None),
    ],
)  # fmt: skip
def test_a_call_is_read_only_where_its_tool_runs_commands(name: str, arguments: object, found: bool | None) -> None:
    assert destroys_by_call(name, arguments) is found


@given(st.lists(st.sampled_from(DESTROYS), max_size=2), st.lists(st.sampled_from([c for c in HARMLESS if "<<" not in c]), max_size=4))
def test_a_script_destroys_when_one_of_its_commands_does(bad: list[str], good: list[str]) -> None:
    lines = sorted([*bad, *good], key=len)
    assert destroys("\n".join(lines)) is bool(bad)


def test_a_here_document_inside_a_quotation_stays_where_it_is() -> None:
    assert destroys('ssh host "bash <<EOF\nrm -rf src\nEOF\n"')
    assert not destroys('ssh host "cat > run.sh <<EOF\nrm -rf src\nEOF\n"')


@given(
    st.lists(
        st.sampled_from(["rm -rf ", "src", "<<A\n", "\nA\n", '"', "'", "\0" + "0" + "\0", "\0" + "7", "ssh h ", "bash -c ", "`", "; ", "x"])
    )
)
def test_any_pieces_of_scripts_get_an_answer(parts: list[str]) -> None:
    assert destroys("".join(parts)) in (True, False)


@given(st.text(alphabet=st.sampled_from("rm -fgit\"'`$(){}|&;<>\\\n/*#=~\0 é"), max_size=80))
def test_any_text_gets_an_answer(text: str) -> None:
    assert destroys(text) in (True, False)
    assert destroys(text.split()) in (True, False)
    assert destroys_by_call("bash", text) in (True, False, None)
