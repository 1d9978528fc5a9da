"""Whether a reply declines what was asked, told from its text by plain rules, so that the fact can be kept without the text (pure).

Declining is saying at the start that one cannot or will not help. Failing is not declining: "I can't find the file", "I couldn't run the
tests" and "this cannot work" report something. Nor is a refusal that is quoted or stands in code.

Takes: the text of a reply. Gives: whether it declines. Leaves out: refusals in other words or in languages that are not here (they count as
answers), and replies that do less than was asked without saying so.
"""

import re
from typing import Final

HEAD_CHARS: Final = 600
"""Of a reply: who declines says so at the start, and the refusal of a detail later on is none of the request."""

_DO: Final = (
    r"(?:help|assist|support (?:this|that|your)|comply|fulfil+ (?:this|that|your|the)|engage|participate"
    r"|do (?:that|this|so)(?= for you[.,;!]|[.,;:!?]|$)"
    r"|(?:answer|process|satisfy|accommodate|honou?r|complete|carry out) (?:this|that|your|the) (?:request|question)"
    r"|(?:provide|share|discuss) (?:this|that|these|those|such|you|any (?:help|assistance|information|advice|guidance|instructions)"
    r"|content|instructions|information|advice|credential)"
    r"|(?:create|write|generate|produce) (?:(?:this|that|such|any) )?(?:content|code for|malware|exploit))"
)
_ENGLISH: Final = (
    rf"\b(?:i|we) (?:really |simply |just )?(?:can['’]t|cannot|can not|won['’]t|will not) (?:\w+ly )?{_DO}",
    rf"\b(?:i|we)(?: am| are|['’]m|['’]re|['’]ve been| have been) "
    rf"(?:not able to|unable to|not going to|not comfortable|not (?:allowed|permitted) to) {_DO}",
    r"\b(?:i|we)(?: am| are|['’]m|['’]re) not comfortable (?:with )?(?:helping|assisting|providing|creating|writing|generating|doing)\b",
    r"\b(?:i|we)(?: must| have to| need to| will have to|['’]ll have to| would rather)?(?: respectfully| politely)? (?:decline|refuse)"
    r"(?: to| this| that| your|[.,!]|$)",
    r"(?:against|violates?|outside|not (?:consistent|in line) with) my (?:\w+ )?(?:guidelines|polic(?:y|ies)|principles)\b",
)  # fmt: skip
_RULES: Final = tuple(
    (marks, re.compile("|".join(patterns), re.M))
    for marks, patterns in (
        (("n't", "n’t", "not ", "unable", "declin", "refus", " my "), _ENGLISH),
        (("nicht", "ableh", "lehne"), (
            r"(?:\bich (?:kann|werde|darf)|\b(?:kann|werde|darf) ich) (?:\S+ ){0,4}?nicht (?:\S+ ){0,2}?(?:helfen|weiterhelfen|unterstützen"
            r"|nachkommen|erfüllen)\b",
            r"\bich lehne (?:\S+ ){0,4}ab\b|\b(?:(?:ich|das) muss|muss ich) (?:\S+ ){0,4}ablehnen\b",
        )),
        (("je ",), (
            r"\bje (?:ne )?(?:peux|pourrai|vais) (?:malheureusement )?pas (?:\S+ ){0,2}?(?:aider|assister|fournir|faire (?:ça|cela)"
            r"|répondre à (?:cette|votre|ta) demande)",
            r"\bje (?:dois|préfère) (?:\S+ )?(?:refuser|décliner)\b|\bje refuse de\b",
        )),
        (("no ", "rechaz", "neg"), (
            r"\bno (?:puedo|podré|voy a) (?:\S+ ){0,2}?(?:ayudar|asistir|proporcionar|cumplir|colaborar|hacer (?:eso|esto))",
            r"\b(?:debo|tengo que) (?:rechazar|negarme|declinar)\b|\bme niego a\b",
        )),
        (("não ", "non "), (
            r"\bnão (?:posso|poderei|vou) (?:\S+ ){0,2}?(?:ajudar|fornecer|atender|fazer (?:isso|isto))",
            r"\bnon posso (?:\S+ ){0,2}?(?:aiutar|fornire|farlo)",
        )),
        (("не ", "отказ"), (
            r"\b(?:не могу|не смогу|не буду) (?:\S+ ){0,3}?(?:помочь|помогать|предоставить|выполнить эт)", r"вынужден\w* отказать",
        )),
        (("无法", "不能", "没法", "没有办法", "拒绝"), (
            r"(?:无法|不能|没法|没有办法)(?:为您|为你|向您|向你|在这方面)?(?:提供帮助|帮助您|帮助你|协助|帮您|帮你|满足(?:您|你|这)|完成(?:您|你|这个)请求)",
            r"拒绝(?:这个|该|您的|你的)请求",
        )),
        (("手伝い", "応え", "協力", "対応", "断り"), (
            r"(?:お手伝い|お応え|ご協力|対応)(?:は|を)?(?:でき(?:ません|かねます)|いたしかね|致しかね)", r"お断り(?:し|いた|させ)",
        )),
    )
)  # fmt: skip
"""By language: marks of which one has to stand in the text before its patterns are tried, which costs far more."""
_QUOTED: Final = re.compile(r"(?s:```.*?(?:```|\Z))|`[^`\n]*`|[\"«“][^\"»”\n]{0,200}[\"»”]|^\s*>.*$", re.M)


def declines(reply: str) -> bool:
    """Return whether a reply declines what was asked."""
    head = reply[:HEAD_CHARS].lower()
    rules = [pattern for marks, pattern in _RULES if any(mark in head for mark in marks)]
    if not rules:
        return False
    said = _QUOTED.sub(" ", head)
    return any(pattern.search(said) for pattern in rules)
