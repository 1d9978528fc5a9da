"""API keys: from the environment, or one local key."""

from pathlib import Path

import pytest

from deploy.serving.keys import load_keys, local_key, who
from pipelines.errors import ConfigError
from pipelines.storage import Home


def test_the_local_key_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    home = Home(tmp_path)
    key = local_key(home)
    assert len(key) >= 32
    assert local_key(home) == key
    assert (home.keys / "gateway.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.keys.iterdir()] == ["gateway.key"]


def test_keys_of_the_environment_replace_the_local_one(tmp_path: Path) -> None:
    keys = load_keys(Home(tmp_path), {"TIDEGATE_API_KEYS": "ide:aaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbb"})
    assert who(keys, "Bearer aaaaaaaaaaaaaaaa") == "ide"
    assert (who(keys, "bearer bbbbbbbbbbbbbbbb") or "").startswith("key-")
    assert not (tmp_path / "keys").exists()
    for wrong in (None, "", "Bearer", "Bearer x", "Basic aaaaaaaaaaaaaaaa", "Bearer aaaaaaaaaaaaaaab"):
        assert who(keys, wrong) is None


def test_short_and_emptied_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than 12"):
        load_keys(Home(tmp_path), {"TIDEGATE_API_KEYS": "ide:short"})
    home = Home(tmp_path)
    local_key(home)
    (home.keys / "gateway.key").write_text("")
    with pytest.raises(ConfigError, match="remove it"):
        local_key(home)
