"""What the text of a plain event looks like: one regular expression an event type, made from the models in `pipelines.events`.

Spark's `from_json` is milder than the contract: it reads a number where a text belongs, passes over fields it does not know and over what
follows the object. Asking for each of these apart costs more than parsing. A text that matches here has none of them: its members are the
type's own, each with a value of the right kind, packed arrays are base64, and the object ends the record. What does not match may still be
an event (other white space, a newer client's field); it is judged by `pipelines.codec` itself.

Takes: the payload models. Gives: expressions that mean the same to Java and to Python. Leaves out: whether the text is JSON at all, which
`from_json` has found out, and what values say (`wire.rule`).
"""

import string
from types import NoneType
from typing import Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.events import PAYLOADS, Client, Envelope
from signals.wire import scalar_type

PACKED: Final = ("prompt_ids", "response_ids", "behaviour_logprobs", "sketch")
"""Fields that hold base64."""
_ESCAPE: Final = r'\\(?:["\\/bfnrt]|u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))'
"""Not of a surrogate: Java takes a lone one, the contract does not."""
_TEXT: Final = rf'"[^"\\]*(?:{_ESCAPE}[^"\\]*)*+"'
_BASE64: Final = f'"[{string.ascii_letters}{string.digits}+/]*={{0,2}}"'
"""Every character by name: Java tests a range three times slower than a set, and this is nine tenths of what is read."""
BASE64: Final = rf"^{_BASE64[1:-1]}(?![\s\S])"
"""The same by itself."""
_WHOLE: Final = r"-?(?:0|[1-9][0-9]{0,17})(?![0-9.eE])"
"""At most eighteen digits: in the range of a BIGINT."""
_REAL: Final = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,2})?(?![0-9.eE])"
"""Finite whatever the digits."""
_VALUES: Final[dict[type, str]] = {bool: "(?:true|false)", int: _WHOLE, float: _REAL, str: _TEXT}


def _value(name: str, field: FieldInfo) -> str:
    value = _BASE64 if name in PACKED else _VALUES[scalar_type(field.annotation)]
    return f"(?:{value}|null)" if NoneType in get_args(field.annotation) else value


def _members(model: type[BaseModel]) -> list[str]:
    """Return the members of a model without what is before the name: fields that are written alike stand together."""
    alike: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        if name not in ("client", "payload", "type"):
            alike.setdefault(_value(name, field), []).append(name)
    return [f'(?:{"|".join(names)})": ?{value}' for value, names in alike.items()]


def _object(members: list[str]) -> str:
    """Return the expression of an object with these members, in any order; possessive, so that no text takes long to be refused."""
    return rf'\{{(?:"(?:{"|".join(members)})(?:, ?)?)*+\}}'


def plain(kind: str) -> str:
    """Return the expression that the whole text of a plain event of a type matches."""
    client, payload = _object(_members(Client)), _object(_members(PAYLOADS[kind]))
    members = [*_members(Envelope), f'type": ?"{kind}"', f'client": ?{client}', f'payload": ?{payload}']
    return rf"^{_object(members)}(?![\s\S])"
