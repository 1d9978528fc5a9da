"""Large events lie in files named by their hash, and only what a pointer names is taken for one."""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import claims, codec
from pipelines.config import KafkaConfig
from pipelines.errors import ConfigError, Rejected
from pipelines.storage import Home
from tests.support.events_for_tests import feedback

NOW = datetime(2026, 3, 2, 23, 59, tzinfo=UTC)


def test_an_event_lies_under_its_day_and_hash_and_its_pointer_says_so(tmp_path: Path) -> None:
    event = codec.encode(feedback())
    claim = claims.put(KafkaConfig(), Home(tmp_path), event, session_id="s1", now=NOW)
    digest = hashlib.sha256(event).hexdigest()
    assert (claim.sha256, claim.size_bytes, claim.session_id) == (digest, len(event), "s1")
    assert claim.uri == f"{(tmp_path / 'claims').as_uri()}/2026-03-02/{digest}.json"
    assert (tmp_path / "claims" / "2026-03-02" / f"{digest}.json").read_bytes() == event
    assert list(claims.local_files(Home(tmp_path))) == [tmp_path / "claims" / "2026-03-02" / f"{digest}.json"]
    assert claims.put(KafkaConfig(), Home(tmp_path), event, session_id="s1", now=NOW) == claim


def test_files_go_where_the_settings_say(tmp_path: Path) -> None:
    config = KafkaConfig(claims=f"{(tmp_path / 'shared').as_uri()}/")
    claim = claims.put(config, Home(tmp_path / "home"), b"{}", session_id="s", now=NOW)
    assert claim.uri.startswith(f"{(tmp_path / 'shared').as_uri()}/2026-03-02/")
    assert Path(claim.uri.removeprefix("file://")).read_bytes() == b"{}"
    with pytest.raises(ConfigError, match=r"kafka\.claims: .* cannot be written"):
        claims.put(KafkaConfig(claims="nowhere://x"), Home(tmp_path), b"{}", session_id="s", now=NOW)


@given(uri=st.text(max_size=30), session=st.text(max_size=30), size=st.integers(0, 2**40))
def test_a_pointer_comes_back_as_it_was(uri: str, session: str, size: int) -> None:
    claim = claims.Claim(uri=uri, sha256="0" * 64, size_bytes=size, session_id=session)
    raw = claims.encode(claim)
    assert raw.startswith(claims.MARK)
    assert claims.parse(raw) == claim
    assert isinstance(codec.decode(raw, 1_000_000), Rejected), "a pointer is no event"


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"claim":', b'{"claim":7}', b'{"claim":{"uri":"x"}}', b' {"claim":{}}', codec.encode(feedback())]
)
def test_anything_else_is_no_pointer(raw: bytes) -> None:
    assert claims.parse(raw) is None


def test_a_pointer_is_small_whatever_it_stands_for() -> None:
    claim = claims.Claim(
        uri="s3://bucket/claims/2026-03-02/" + "0" * 64 + ".json", sha256="0" * 64, size_bytes=32_000_000, session_id="s" * 128
    )
    assert len(claims.encode(claim)) < 500
    assert json.loads(claims.encode(claim))["session_id"] == "s" * 128
