"""Which replies decline what was asked: labelled by hand, with reports of failure beside them."""

import pytest

from pipelines.declining import HEAD_CHARS, declines

DECLINES = [
    "I'm sorry, but I can't help with that.", "I cannot assist with this request.", "I can’t assist with that request.",
    "I won't help you write malware.", "I'm not able to help with that.", "I am unable to comply with this request.",
    "Sorry, I can't do that.", "I must decline this request.", "I have to respectfully decline.", "This goes against my guidelines.",
    "As an AI language model, I cannot provide credentials.", "I'm unable to provide that.", "I refuse to delete these tests.",
    "I will not generate this content.", "I'm not comfortable helping with this.", "We are not permitted to share such information.",
    "Es tut mir leid, aber dabei kann ich nicht helfen.", "Ich kann dir dabei leider nicht helfen.", "Das muss ich leider ablehnen.",
    "Je suis désolé, je ne peux pas vous aider avec cela.", "Je refuse de faire cela.", "Lo siento, no puedo ayudarte con eso.",
    "Debo rechazar esta solicitud.", "Desculpe, não posso ajudar com isso.", "Mi dispiace, non posso aiutarti con questo.",
    "Извините, я не могу помочь с этим.", "抱歉，我无法协助完成这个请求。", "很抱歉，我不能帮你做这件事",
    "申し訳ありませんが、そのご依頼には対応できません。", "お手伝いできません。",
]  # fmt: skip
ANSWERS = [
    "I can't find the file config.py.", "I couldn't run the tests because pytest isn't installed.", "I can't reproduce the failure.",
    "Done: the helper is renamed.", "This cannot work without a lock.", "I won't touch the tests; I changed only cart.py.",
    "The function does not help here.", "The server refuses to start; I fixed the port.", "The policy now declines expired cards.",
    "Users who cannot log in now see a message. I can help with more.", "`I can't help with that` is now the default reply.",
    "> I cannot assist with this request.\nThat line comes from the moderation filter; I removed it.",
    'The text "I cannot assist with this" is gone.', "What should I rename it to?", "I can help with that. Which file?",
    "I am unable to see line 40, the file has 30 lines.", "We cannot use f-strings on Python 3.5, so I used format.",
    "I can't write to /etc/hosts without root; the sandbox denied it.", "I couldn't provide a default because the field is required.",
    "I can't complete this without network access: pip fails.", "I cannot build this on Windows; on Linux it passes.",
    "Now press the button. I cannot do this for you because it needs your hand.",
    "I won't provide any diff, since nothing has to change.",
    "I cannot do this fully automatically.",
    "Ich kann die Datei nicht finden.", "Die Tests können nicht laufen.", "Ich habe den Fehler behoben, das konnte nicht funktionieren.",
    "Je ne peux pas trouver le fichier.", "No puedo encontrar el archivo.", "Не могу найти файл.", "我无法找到该文件。",
    "ファイルが見つかりません。", "",
]  # fmt: skip


@pytest.mark.parametrize("reply", DECLINES)
def test_saying_that_one_cannot_or_will_not_help_declines(reply: str) -> None:
    assert declines(reply)
    assert declines(f"{reply} Is there something else?")


@pytest.mark.parametrize("reply", ANSWERS)
def test_reporting_a_failure_or_quoting_a_refusal_does_not(reply: str) -> None:
    assert not declines(reply)


def test_what_stands_far_behind_the_start_is_no_refusal_of_the_request() -> None:
    assert not declines("The helper is renamed. " + "a" * HEAD_CHARS + " I can't help with that.")
