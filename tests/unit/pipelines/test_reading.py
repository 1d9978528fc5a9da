"""What plain rules read from texts, on texts as people and models write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.reading import claims, edit_expected, ends_in_question, files_named, independent

REQUESTS = (
    "Rename total to amount in cart.py",
    "Please fix the failing test",
    "can you add a retry to the client?",
    "could you please update the docs",
    "I want you to remove the debug prints",
    "no, use ref instead",
    "thanks! now write a test for it",
    "ok, then move it into utils.ts",
    "Traceback (most recent call last):\n  File \"a.py\", line 3\nValueError: x\nfix this",
    "Füge einen Test hinzu",
    "bitte ersetze print durch logging",
    "Kannst du die Datei umbenennen und den Import ändern? Benenne sie um",
    "corrige le bug dans panier.py",
    "Ajoute un cas pour les listes vides",
    "añade un test para el caso vacío",
    "cambia el nombre de la función",
    "Remova os logs de depuração",
    "добавь тест",
    "次にテストを追加して",
    "把 total 重命名为 amount",
)  # fmt: skip
OTHERS = (
    "What does this function do?",
    "why is the build red",
    "How do I run the tests?",
    "explain the retry logic",
    "thanks",
    "still fails",
    "the second one",
    "yes",
    "Which of the two files is used?",
    "where is the config read",
    "Should we add a cache here?",
    "Was macht diese Funktion?",
    "warum schlägt der Test fehl",
    "pourquoi le test échoue ?",
    "¿qué hace esta función?",
    "cómo funciona el despliegue",
    "что делает эта функция?",
    "この関数は何をしますか、説明してください",
    "",
    "`add`",
)


@pytest.mark.parametrize("message", REQUESTS)
def test_a_request_for_a_change_is_read_as_one_in_whatever_language(message: str) -> None:
    assert edit_expected(message) >= 0.5


@pytest.mark.parametrize("message", OTHERS)
def test_a_question_a_word_of_thanks_or_a_bare_answer_is_no_request_for_a_change(message: str) -> None:
    assert edit_expected(message) < 0.5


@given(st.text(max_size=300))
def test_any_text_is_read_as_a_probability(message: str) -> None:
    assert 0.0 < edit_expected(message) < 1.0
    assert claims(message, [message])[1] == 0


@pytest.mark.parametrize(
    ("reply", "asks"),
    [
        ("Which file do you mean?", True),
        ("Do you want `a` or `b`?**\n", True),
        ("(Shall I go on?)", True),
        ("どのファイルですか？", True),
        ("Why did it fail? Because the import was missing.", False),
        ("Done.", False),
        ("", False),
    ],
)
def test_a_reply_asks_when_it_ends_in_a_question(reply: str, asks: bool) -> None:
    assert ends_in_question(reply) is asks


def test_files_are_paths_and_names_with_a_common_ending_and_links_are_not() -> None:
    text = (
        "I changed src/cart.py and ./README.md, e.g. line 3.5; see https://example.org/a/b.html, Node.js aside, "
        "version 1.2 of cart.py: src/cart.py"
    )
    assert files_named(text) == ["src/cart.py", "README.md", "cart.py"]


def test_a_claim_about_a_file_that_was_read_or_found_is_backed_and_one_the_user_only_named_is_not() -> None:
    looked_at = ['{"path": "src/cart.py"}', "src/shop.py:3: total"]
    assert claims("cart.py sums up, shop.py calls it, tax.py adds the tax", looked_at) == (3, 1)
    assert claims("All is well.", looked_at) == (0, 0)


def test_a_call_depends_on_a_result_when_it_takes_a_word_from_it() -> None:
    known = "Rename total to amount in cart.py and shop.py"
    assert independent('{"path": "shop.py"}', results=["def total(): ..."], known=known)
    assert not independent('{"path": "helpers/money.py"}', results=["from helpers/money.py import cents"], known=known)
    assert not independent('{"old": "def total(): ...", "path": "cart.py"}', results=["def total(): ..."], known="Rename it in cart.py")
