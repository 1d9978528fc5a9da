"""The figures of the style guide: how long modules and functions may be, what is documented, how much is patched in tests."""

import ast
import re

from tests.architecture.source import ROOT, functions, modules

MODULE_LINES = 500
FUNCTION_LINES = 80
PATCHES_PER_1000_TEST_LINES = 1.0
BROAD_EXCEPTS = {
    "pipelines.terminal": "the frame of every command: the last line before a traceback",
    "deploy.doctor": "one ill check must not hide the others",
    "trainer.chat": "the tokenizers library raises bare Exception",
}
"""Where everything may be caught, and why."""


def test_no_module_is_longer_than_a_person_reads_in_one_go() -> None:
    assert {module.name: module.lines for module in modules() if module.lines > MODULE_LINES} == {}


def test_no_function_is_longer_than_a_screen_and_a_half() -> None:
    long = {
        f"{module.name}.{function.name}": length
        for module in modules()
        for function in functions(module)
        if (length := (function.end_lineno or function.lineno) - function.lineno + 1) > FUNCTION_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    silent = [module.name for module in (*modules(), *modules("tests")) if module.text and not ast.get_docstring(module.tree)]
    assert silent == []


def test_every_argument_and_result_is_annotated() -> None:
    bare = []
    for module in modules():
        for function in functions(module):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
            if function.returns is None or any(argument.annotation is None for argument in named):
                bare.append(f"{module.name}.{function.name}")
    assert bare == []


def test_init_modules_hold_a_docstring_only() -> None:
    full = [module.name for module in modules() if module.path.name == "__init__.py" and len(module.tree.body) > 1]
    assert full == []


def test_broad_excepts_are_only_where_there_is_a_reason() -> None:
    broad = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id == "Exception"))
    ]
    allowed = BROAD_EXCEPTS.keys() | {module.name for module in modules() if module.name.endswith("__main__")}
    assert [place for place in broad if place.partition(":")[0] not in allowed] == []


def test_tests_hardly_patch() -> None:
    patch = re.compile(r"\bmonkeypatch\.setattr\(|\bmock\.patch\b|\bMagicMock\(|\bmocker\.")
    own = ROOT / "tests" / "architecture" / "test_budgets.py"
    texts = [module.text for module in modules("tests") if module.path != own]
    patches = sum(len(patch.findall(text)) for text in texts)
    lines = sum(text.count("\n") for text in texts)
    assert patches <= max(1, lines / 1000 * PATCHES_PER_1000_TEST_LINES), (patches, lines)


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    skipping = re.compile(r"pytest\.(skip|importorskip|xfail)\(|pytest\.mark\.(skip|skipif|xfail)\b")
    own = ROOT / "tests" / "architecture" / "test_budgets.py"
    assert [module.name for module in modules("tests") if module.path != own and skipping.search(module.text)] == []
